// The names and texts of CUDA's errors.

#include "record.h"

namespace {

struct Error {
  cudaError_t error;
  const char *name, *text;
};

#define NULL_CUDA_ERROR(name, text) {name, #name, text}
constexpr Error kErrors[] = {
    NULL_CUDA_ERROR(cudaSuccess, "no error"),
    NULL_CUDA_ERROR(cudaErrorInvalidValue, "invalid argument"),
    NULL_CUDA_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    NULL_CUDA_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    NULL_CUDA_ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    NULL_CUDA_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    NULL_CUDA_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    NULL_CUDA_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    NULL_CUDA_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    NULL_CUDA_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    NULL_CUDA_ERROR(cudaErrorNotReady, "device not ready"),
    NULL_CUDA_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    NULL_CUDA_ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    NULL_CUDA_ERROR(cudaErrorNotSupported, "operation not supported"),
    NULL_CUDA_ERROR(cudaErrorSymbolNotFound, "named symbol not found"),
    NULL_CUDA_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    NULL_CUDA_ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    NULL_CUDA_ERROR(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    NULL_CUDA_ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    NULL_CUDA_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    NULL_CUDA_ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    NULL_CUDA_ERROR(cudaErrorStreamCaptureImplicit,
                    "operation would make the legacy stream depend on a capturing blocking stream"),
    NULL_CUDA_ERROR(cudaErrorStreamCaptureWrongThread,
                    "attempt to terminate a thread-local capture sequence from another thread"),
    NULL_CUDA_ERROR(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    NULL_CUDA_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef NULL_CUDA_ERROR

const Error *find(cudaError_t error) {
  for (const Error &each : kErrors) {
    if (each.error == error) return &each;
  }
  return nullptr;
}

}  // namespace

NULL_CUDA_API const char *cudaGetErrorName(cudaError_t error) {
  const Error *known = find(error);
  return known == nullptr ? "unrecognized error code" : known->name;
}

NULL_CUDA_API const char *cudaGetErrorString(cudaError_t error) {
  const Error *known = find(error);
  return known == nullptr ? "unrecognized error code" : known->text;
}
