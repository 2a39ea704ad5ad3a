// Pinned memory of the host, and the copies to it that are on their way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace null_cuda {

bool is_pinned(const void *address);

// Copies bytes to pinned memory, which holds NaN until they arrive. What they are now is what arrives. Returns the
// number of the copy.
uint64_t send(char *to, const char *from, size_t size);

// How many copies were sent so far, and the arrival of the first `count` of them.
uint64_t sent();
void arrive(uint64_t count);
void arrive_all();

// Lets those of the first `count` copies arrive that go to this memory, for a device that is ordered after them.
void arrive_for(const char *memory, size_t size, uint64_t count);

}  // namespace null_cuda
