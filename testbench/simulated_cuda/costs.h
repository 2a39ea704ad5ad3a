// What operators cost on CUDA, as PyTorch's host code has it. testbench/null_cuda runs that code, and `cargo xtask test`
// compares both for every operator of the tests that run there.
#pragma once

#include <vector>

#include "semantics.h"

namespace simulated {

// Whether PyTorch's kernel reads a number back to go on, for which the host waits.
bool waits(const Call &call);

// The kernels that PyTorch launches for a call on device tensors: none for views, one in general, and for lists as many
// as libtorch needs for them.
int64_t launches(const Call &call);

using Lists = std::vector<std::vector<at::Tensor>>;

// The arguments that are lists of tensors and not empty, except for one of that name.
Lists lists_of(const Call &call, const char *without = "");

// Whether the lists of a `_foreach` operator are such that libtorch launches kernels for all of their tensors together.
bool share_a_launch(const Call &call);

// Whether the tensors of the lists have one device, one layout and the same sizes, and one dtype.
bool are_alike(const Lists &lists, bool skip_dtypes_across = false);

}  // namespace simulated
