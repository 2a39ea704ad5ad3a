// The one lock of the runtime, the counters, and the last error of each thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "../api.h"

namespace null_cuda {

// Guards everything that devices, streams and graphs are made of.
std::recursive_mutex &lock();
using Guard = std::lock_guard<std::recursive_mutex>;

// Adds one to a counter of a device; -1 stands for no device. `details` are for the trace.
void note(const std::string &kind, int device, const std::string &details = "");

// Keeps an error for cudaGetLastError, counts it, and returns it.
cudaError_t fail(cudaError_t error, const char *function);

// The kernel's number of the calling thread.
uint64_t thread_id();

}  // namespace null_cuda
