// The few functions of the driver that libtorch calls.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>

#include "library.h"

using null_cuda::give;

namespace {

// A context is the address of its device's place here.
char contexts[64];

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(&contexts[device]); }

}  // namespace

NULL_CUDA_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

NULL_CUDA_API CUresult cuDriverGetVersion(int *version) { return give<CUresult>(version, CUDA_VERSION); }

NULL_CUDA_API CUresult cuDeviceGetCount(int *count) {
  cudaGetDeviceCount(count);
  return CUDA_SUCCESS;
}

NULL_CUDA_API CUresult cuDeviceGet(CUdevice *device, int ordinal) { return give<CUresult>(device, ordinal); }

// The runtime has the driver's numbers for attributes and errors.
NULL_CUDA_API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

NULL_CUDA_API CUresult cuGetErrorString(CUresult error, const char **text) {
  return give<CUresult>(text, cudaGetErrorString(static_cast<cudaError_t>(error)));
}

NULL_CUDA_API CUresult cuGetErrorName(CUresult error, const char **text) {
  return give<CUresult>(text, cudaGetErrorName(static_cast<cudaError_t>(error)));
}

NULL_CUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

NULL_CUDA_API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return give<CUresult>(context, context_of(device));
}

NULL_CUDA_API CUresult cuCtxGetCurrent(CUcontext *context) {
  return give<CUresult>(context, context_of(null_cuda_current_device()));
}

NULL_CUDA_API CUresult cuCtxSetCurrent(CUcontext context) {
  if (context != nullptr) cudaSetDevice(static_cast<int>(reinterpret_cast<char *>(context) - contexts));
  return CUDA_SUCCESS;
}

NULL_CUDA_API CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, reinterpret_cast<const void *>(pointer));
  if (attributes.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  const bool is_device = attributes.type == cudaMemoryTypeDevice;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext *>(out) = context_of(attributes.device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int *>(out) = attributes.device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned *>(out) = is_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

// Kernels that were compiled at run time: a module is the text of its binary, a function its name.
NULL_CUDA_API CUresult cuModuleLoadData(CUmodule *out, const void *image) {
  return give<CUresult>(out, reinterpret_cast<CUmodule>(new std::string(static_cast<const char *>(image))));
}

NULL_CUDA_API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

NULL_CUDA_API CUresult cuModuleGetFunction(CUfunction *out, CUmodule, const char *name) {
  return give<CUresult>(out, reinterpret_cast<CUfunction>(new std::string(name)));
}

NULL_CUDA_API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute, CUfunction) {
  return give<CUresult>(value, 32);
}

NULL_CUDA_API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }

NULL_CUDA_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction, int block, size_t) {
  return give<CUresult>(out, 2048 / block);
}

NULL_CUDA_API CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                      unsigned, CUstream stream, void **, void **) {
  const auto &name = *reinterpret_cast<std::string *>(function);
  return static_cast<CUresult>(null_cuda_library_call("compiled at run time:", stream, name.c_str()));
}
