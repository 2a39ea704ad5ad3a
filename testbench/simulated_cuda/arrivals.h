// Copies to pinned memory, which are on their way until somebody has waited for them or an event says that they are
// there. Until then the memory holds garbage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace simulated {

// Sends the numbers of `from`, a tensor that kernels can read, to `to`.
void send(const at::Tensor &from, const at::Tensor &to);

// How many copies were sent so far.
uint64_t sent();

// Whether the first `count` copies are there.
bool has_arrived(uint64_t count);

// Lets the first `count` copies arrive, or all of them.
void arrive(uint64_t count);
void arrive_all();

}  // namespace simulated
