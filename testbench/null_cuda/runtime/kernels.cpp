// Kernels: their registration, and their launches, which are checked and counted and do nothing.
//
// What a kernel needs of registers and shared memory is not known here: only what CUDA requires of every launch is
// checked.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <unordered_map>
#include <vector>

#include "devices.h"
#include "record.h"
#include "streams.h"

namespace null_cuda {
namespace {

constexpr int kRegisters = 32;           // of each kernel
constexpr int kSharedMemory = 48 << 10;  // unless a kernel has asked for more
constexpr int kMostSharedMemory = 227 << 10;
constexpr int kRegistersOfDevice = 65536, kThreadsOfProcessor = 2048, kMostThreads = 1024;

struct Kernel {
  std::string name;
  int dynamic_memory = kSharedMemory;  // the most that a launch may ask for
};

// By the function of the host that launches it.
std::unordered_map<const void *, Kernel> &kernels() {
  static auto *const all = new std::unordered_map<const void *, Kernel>;
  return *all;
}

Kernel *kernel_of(const void *function) {
  const auto found = kernels().find(function);
  return found == kernels().end() ? nullptr : &found->second;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

// Those of the launches that `kernel<<<…>>>()` has begun.
thread_local std::vector<Configuration> begun;

bool is_possible(const dim3 &grid, const dim3 &block) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const bool is_empty = threads == 0 || grid.x == 0 || grid.y == 0 || grid.z == 0;
  return !is_empty && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535 && block.z <= 64 &&
         threads <= kMostThreads;
}

std::string describe(const Kernel &kernel, const Configuration &c) {
  char shape[160];
  snprintf(shape, sizeof shape, " (%u,%u,%u)x(%u,%u,%u)", c.grid.x, c.grid.y, c.grid.z, c.block.x, c.block.y,
           c.block.z);
  return kernel.name + shape;
}

cudaError_t launch(const void *function, const Configuration &c, const char *name) {
  const Guard guard(lock());
  const Kernel *kernel = kernel_of(function);
  if (kernel == nullptr) return fail(cudaErrorInvalidDeviceFunction, name);
  if (!is_possible(c.grid, c.block)) return fail(cudaErrorInvalidConfiguration, name);
  if (c.shared > static_cast<size_t>(kernel->dynamic_memory)) return fail(cudaErrorInvalidValue, name);
  const Stream *stream = stream_of(c.stream);
  if (stream == nullptr || stream->device != current_device()) return fail(cudaErrorInvalidResourceHandle, name);
  return enqueue(c.stream, "launch/kernel", describe(*kernel, c), nullptr, name);
}

}  // namespace
}  // namespace null_cuda

using namespace null_cuda;

NULL_CUDA_API void **__cudaRegisterFatBinary(void *binary) { return static_cast<void **>(binary); }
NULL_CUDA_API void __cudaRegisterFatBinaryEnd(void **) {}
NULL_CUDA_API void __cudaUnregisterFatBinary(void **) {}
NULL_CUDA_API char __cudaInitModule(void **) { return 1; }

NULL_CUDA_API void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *,
                                          void *, void *, int *) {
  const Guard guard(lock());
  kernels()[host].name = name;
}

NULL_CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  begun.push_back({grid, block, shared, static_cast<cudaStream_t>(stream)});
  return 0;
}

NULL_CUDA_API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (begun.empty()) return fail(cudaErrorInvalidConfiguration, "__cudaPopCallConfiguration");
  const Configuration &last = begun.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t *>(stream) = last.stream;
  begun.pop_back();
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) {
  return give<cudaError_t>(out, reinterpret_cast<cudaKernel_t>(const_cast<void *>(function)));
}

NULL_CUDA_API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **, size_t shared,
                                           cudaStream_t stream) {
  return launch(function, {grid, block, shared, stream}, "cudaLaunchKernel");
}

NULL_CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **, size_t shared,
                                             cudaStream_t stream) {
  return launch(reinterpret_cast<const void *>(kernel), {grid, block, shared, stream}, "cudaLaunchKernel");
}

NULL_CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function, void **) {
  return launch(function, {c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream}, "cudaLaunchKernelExC");
}

NULL_CUDA_API cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **,
                                                      size_t shared, cudaStream_t stream) {
  return launch(function, {grid, block, shared, stream}, "cudaLaunchCooperativeKernel");
}

NULL_CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *function) {
  const Guard guard(lock());
  const Kernel *kernel = kernel_of(function);
  if (kernel == nullptr) return fail(cudaErrorInvalidDeviceFunction, "cudaFuncGetAttributes");
  *out = {};
  out->numRegs = kRegisters;
  out->maxThreadsPerBlock = kMostThreads;
  out->ptxVersion = out->binaryVersion = 90;
  out->maxDynamicSharedSizeBytes = kernel->dynamic_memory;
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value) {
  const Guard guard(lock());
  Kernel *kernel = kernel_of(function);
  if (kernel == nullptr) return fail(cudaErrorInvalidDeviceFunction, "cudaFuncSetAttribute");
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > kMostSharedMemory) return fail(cudaErrorInvalidValue, "cudaFuncSetAttribute");
  kernel->dynamic_memory = value;
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, cudaFuncAttribute attribute, int value,
                                                          int) {
  return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

NULL_CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *, int block,
                                                                                 size_t shared, unsigned) {
  const int threads = std::max(32, (block + 31) / 32 * 32);
  const int by_memory = static_cast<int>((size_t{228} << 10) / (shared + 1024));
  *out = std::min({32, kThreadsOfProcessor / threads, kRegistersOfDevice / (kRegisters * threads), by_memory});
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *function, int block,
                                                                        size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, function, block, shared, 0);
}
