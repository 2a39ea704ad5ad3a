// Copies to pinned memory, which are on their way until somebody has waited for them or an event says that they are
// there. Until then the memory holds garbage, also for a device that copies it back on a stream that is not ordered after
// the copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace simulated {

// Sends the numbers of `from`, a tensor that kernels can read, to `to`, on a stream.
void send(const at::Tensor &from, const at::Tensor &to, const c10::Stream &stream);

// The last copy after which a stream is ordered: its own, and those of events that it waits for.
uint64_t last_before(const c10::Stream &stream);
void order_after(const c10::Stream &stream, uint64_t last);

// Lets the copies to this memory arrive after which the stream is ordered.
void arrive_for(const c10::Stream &stream, const at::Tensor &memory);

// How many copies were sent so far.
uint64_t sent();

// Whether the first `count` copies are there.
bool has_arrived(uint64_t count);

// Lets the first `count` copies arrive, or all of them.
void arrive(uint64_t count);
void arrive_all();

}  // namespace simulated
