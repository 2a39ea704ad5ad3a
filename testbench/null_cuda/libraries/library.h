// What the stand-ins for libraries share.
#pragma once

#include "../api.h"
#include "../null_cuda.h"
