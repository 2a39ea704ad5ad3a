// What the stand-ins for libraries share.
#pragma once

#include "../null_cuda.h"

#define NULL_CUDA_API extern "C" __attribute__((visibility("default")))
