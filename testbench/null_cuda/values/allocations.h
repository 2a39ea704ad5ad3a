// Allocations of tensors: which one fails, and what fresh memory holds.
#pragma once

namespace null_cuda {

// Whether libtorch's caching allocator exists.
bool has_allocator();

// Takes part in the allocator's allocations, once it exists.
void watch_allocations();

}  // namespace null_cuda
