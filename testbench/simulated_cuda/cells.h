// The LSTM and GRU cells of CUDA, which are one kernel each there and do not exist on the CPU.
#pragma once

#include "semantics.h"

namespace simulated {

// Runs a cell, or the backward of one, whose arguments lie on the CPU. Returns whether the operator is one.
bool compute_cell(const Call &call);

}  // namespace simulated
