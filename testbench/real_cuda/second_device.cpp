// Shows the only GPU of a machine a second time, as device 1, so that the tests of several devices run there. To be
// preloaded. Both devices are the same memory and the same legacy stream; everything else is PyTorch's own code for two.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>

#undef cudaGetDeviceProperties

namespace {

constexpr int REAL = 0;
constexpr int COUNT = 2;

thread_local int current = 0;

// glibc's own dlsym.
decltype(&dlsym) real_dlsym() {
  static const auto found = reinterpret_cast<decltype(&dlsym)>(dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
  return found;
}

// The function of this name in the real runtime, which is among the dependencies of the program or loaded by it.
template <typename F>
F *runtime(F *, const char *name) {
  void *found = real_dlsym()(RTLD_NEXT, name);
  if (found == nullptr) found = real_dlsym()(dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD), name);
  return reinterpret_cast<F *>(found);
}

#define RUNTIME(name) runtime(&name, #name)

bool is_valid(int device) { return 0 <= device && device < COUNT; }

constexpr const char *PRIMARY_CONTEXT = "cuDevicePrimaryCtxGetState";

// The driver's own function, of the only device.
CUresult state_of_either(CUdevice, unsigned *flags, int *active) {
  static void *const found = real_dlsym()(dlopen("libcuda.so.1", RTLD_NOW), PRIMARY_CONTEXT);
  return reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(found)(REAL, flags, active);
}

}  // namespace

extern "C" {

// libtorch looks in the driver's library for the one function that takes the number of a device. The other calls jump to
// glibc's, which takes the caller of this one for the one that asks.
__attribute__((optimize("O2"))) void *dlsym(void *handle, const char *name) noexcept {
  if (std::strcmp(name, PRIMARY_CONTEXT) == 0) return reinterpret_cast<void *>(&state_of_either);
  return real_dlsym()(handle, name);
}

cudaError_t cudaGetDeviceCount(int *count) {
  const auto status = RUNTIME(cudaGetDeviceCount)(count);
  if (status == cudaSuccess && *count == 1) *count = COUNT;
  return status;
}

cudaError_t cudaSetDevice(int device) {
  if (!is_valid(device)) return cudaErrorInvalidDevice;
  current = device;
  return RUNTIME(cudaSetDevice)(REAL);
}

cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  if (!is_valid(device)) return cudaErrorInvalidDevice;
  return RUNTIME(cudaGetDeviceProperties)(properties, REAL);
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  return RUNTIME(cudaDeviceGetAttribute)(value, attribute, REAL);
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int) {
  return RUNTIME(cudaDeviceGetPCIBusId)(id, length, REAL);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) {
  return RUNTIME(cudaDeviceGetDefaultMemPool)(pool, REAL);
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
  *can = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
  return RUNTIME(cudaMemcpyAsync)(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult *result) {
  const auto status = RUNTIME(cudaGetDriverEntryPointByVersion)(symbol, function, version, flags, result);
  if (status == cudaSuccess && *function != nullptr && std::strcmp(symbol, PRIMARY_CONTEXT) == 0) {
    *function = reinterpret_cast<void *>(&state_of_either);
  }
  return status;
}

}  // extern "C"
