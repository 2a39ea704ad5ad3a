// What a test asks of devices that are counted. Found with dlsym: a program that runs on plain real ones has none of it.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SIMULATED_CUDA_LAUNCHES = 0,     // kernels, copies within and between devices included
  SIMULATED_CUDA_HOST_SYNCS = 1,   // times that the host waited for a device
  SIMULATED_CUDA_ALLOCATIONS = 2,  // of device memory
  SIMULATED_CUDA_BYTES = 3,        // held now
  SIMULATED_CUDA_PEAK_BYTES = 4,   // held at once
};

// What the devices are, and with them what their counters and their results mean.
enum {
  SIMULATED_CUDA_MODEL = 0,           // the library in this folder, which models what PyTorch's host code costs
  SIMULATED_CUDA_REAL_HOST_CODE = 1,  // null_cuda: PyTorch's own host code. Numbers are the CPU's in both
  SIMULATED_CUDA_REAL_GPU = 2,        // real_cuda
};
int32_t simulated_cuda_kind(void);

// One of these numbers since the start or the last reset, of one device; -1 adds up all of them.
int64_t simulated_cuda_counter(int32_t device, int32_t counter);

// Sets the counters to zero, and the peak to what is held now.
void simulated_cuda_reset(void);

// Makes the n-th allocation of device memory from now on fail; zero calls it off. Returns how many were still to come
// before the last planted failure: zero if it has happened.
int64_t simulated_cuda_fail_allocation(int64_t n);

#ifdef __cplusplus
}
#endif
