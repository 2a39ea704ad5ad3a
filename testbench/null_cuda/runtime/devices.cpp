#include "devices.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <utility>

#include "../null_cuda.h"
#include "record.h"
#include "settings.h"

namespace null_cuda {
namespace {

thread_local int current = 0;
bool peers[simulated::kMostDevices][simulated::kMostDevices];

bool exists(int device) { return device >= 0 && device < simulated::device_count(); }

}  // namespace

int current_device() { return current; }

}  // namespace null_cuda

using namespace null_cuda;

NULL_CUDA_API cudaError_t cudaGetDeviceCount(int *count) {
  *count = simulated::device_count();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice, "cudaGetDeviceCount");
}

NULL_CUDA_API cudaError_t cudaGetDevice(int *device) { return give<cudaError_t>(device, current); }

NULL_CUDA_API cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) return fail(cudaErrorInvalidDevice, "cudaSetDevice");
  current = device;
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaDriverGetVersion(int *version) { return give<cudaError_t>(version, CUDART_VERSION); }

NULL_CUDA_API cudaError_t cudaRuntimeGetVersion(int *version) { return give<cudaError_t>(version, CUDART_VERSION); }

namespace {

// What an H100 says of its threads, its memory and itself.
void describe_threads(cudaDeviceProp &p) {
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.multiProcessorCount = 132;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.concurrentKernels = p.cooperativeLaunch = p.computePreemptionSupported = p.clusterLaunch = 1;
}

void describe_memory(cudaDeviceProp &p) {
  p.totalGlobalMem = simulated::device_memory();
  p.totalConstMem = 65536;
  p.sharedMemPerBlock = 48 << 10;
  p.sharedMemPerBlockOptin = 227 << 10;
  p.sharedMemPerMultiprocessor = 228 << 10;
  p.reservedSharedMemPerBlock = 1024;
  p.l2CacheSize = 50 << 20;
  p.persistingL2CacheMaxSize = 32 << 20;
  p.memPitch = 2147483647;
  p.memoryBusWidth = 5120;
  p.textureAlignment = p.surfaceAlignment = 512;
  p.texturePitchAlignment = 32;
  p.canMapHostMemory = p.unifiedAddressing = p.hostRegisterSupported = p.memoryPoolsSupported = 1;
  p.managedMemory = p.concurrentManagedAccess = p.canUseHostPointerForRegisteredMem = 1;
  p.globalL1CacheSupported = p.localL1CacheSupported = p.ECCEnabled = 1;
}

}  // namespace

NULL_CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  if (!exists(device)) return fail(cudaErrorInvalidDevice, "cudaGetDeviceProperties");
  *p = {};
  snprintf(p->name, sizeof p->name, "null CUDA, with the properties of an NVIDIA H100");
  memset(p->uuid.bytes, 0x10 + device, sizeof p->uuid.bytes);
  p->major = 9;
  p->pciBusID = 0x10 + device;
  p->asyncEngineCount = 3;
  p->streamPrioritiesSupported = 1;
  p->hostNumaId = -1;
  describe_threads(*p);
  describe_memory(*p);
  return cudaSuccess;
}

namespace {

// Those attributes that libtorch and its libraries ask for; zero means that the device lacks it.
int attribute_of(const cudaDeviceProp &p, cudaDeviceAttr attribute) {
  const std::map<cudaDeviceAttr, int> known{
      {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
      {cudaDevAttrMaxBlockDimX, p.maxThreadsDim[0]},
      {cudaDevAttrMaxBlockDimY, p.maxThreadsDim[1]},
      {cudaDevAttrMaxBlockDimZ, p.maxThreadsDim[2]},
      {cudaDevAttrMaxGridDimX, p.maxGridSize[0]},
      {cudaDevAttrMaxGridDimY, p.maxGridSize[1]},
      {cudaDevAttrMaxGridDimZ, p.maxGridSize[2]},
      {cudaDevAttrMaxSharedMemoryPerBlock, p.sharedMemPerBlock},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, p.sharedMemPerBlockOptin},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, p.sharedMemPerMultiprocessor},
      {cudaDevAttrReservedSharedMemoryPerBlock, p.reservedSharedMemPerBlock},
      {cudaDevAttrTotalConstantMemory, p.totalConstMem},
      {cudaDevAttrWarpSize, p.warpSize},
      {cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock},
      {cudaDevAttrMaxRegistersPerMultiprocessor, p.regsPerMultiprocessor},
      {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
      {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, p.maxBlocksPerMultiProcessor},
      {cudaDevAttrComputeCapabilityMajor, p.major},
      {cudaDevAttrComputeCapabilityMinor, p.minor},
      {cudaDevAttrL2CacheSize, p.l2CacheSize},
      {cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth},
      {cudaDevAttrPciBusId, p.pciBusID},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 2619000},
      {cudaDevAttrConcurrentKernels, 1},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrCanMapHostMemory, 1},
      {cudaDevAttrStreamPrioritiesSupported, 1},
      {cudaDevAttrCooperativeLaunch, 1},
      {cudaDevAttrMemoryPoolsSupported, 1},
      {cudaDevAttrHostRegisterSupported, 1},
      {cudaDevAttrClusterLaunch, 1},
      {cudaDevAttrManagedMemory, 1},
      {cudaDevAttrConcurrentManagedAccess, 1},
  };
  const auto found = known.find(attribute);
  return found == known.end() ? 0 : found->second;
}

}  // namespace

NULL_CUDA_API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  return give<cudaError_t>(value, attribute_of(p, attribute));
}

NULL_CUDA_API cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) {
  snprintf(out, static_cast<size_t>(size), "0000:%02X:00.0", 0x10 + device);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  return give<cudaError_t>(can, device != peer);
}

NULL_CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const Guard guard(lock());
  if (!exists(peer)) return fail(cudaErrorInvalidDevice, "cudaDeviceEnablePeerAccess");
  const bool was_enabled = std::exchange(peers[current][peer], true);
  return was_enabled ? fail(cudaErrorPeerAccessAlreadyEnabled, "cudaDeviceEnablePeerAccess") : cudaSuccess;
}

// The driver's functions are those of the stand-in for libcuda.so.1.
NULL_CUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned, unsigned long long,
                                                           cudaDriverEntryPointQueryResult *status) {
  static void *const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *out = driver == nullptr ? nullptr : dlsym(driver, symbol);
  if (status != nullptr) *status = *out != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *out != nullptr || status != nullptr ? cudaSuccess : fail(cudaErrorSymbolNotFound, "cudaGetDriverEntryPoint");
}

NULL_CUDA_API int32_t null_cuda_current_device(void) { return current; }
