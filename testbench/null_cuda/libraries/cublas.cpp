// cuBLAS: handles keep what they are told, and a product is a launch that computes nothing.

struct __half;
struct __nv_bfloat16;
#include <cublas_v2.h>

#include <cstdio>
#include <string>

#include "library.h"

using null_cuda::give;

struct cublasContext {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
};

namespace {

cublasStatus_t launch(cublasHandle_t handle, const char *name, const std::string &details) {
  const bool is_done = null_cuda_library_call(name, handle->stream, details.c_str()) == 0;
  return is_done ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

std::string shape(cublasOperation_t a, cublasOperation_t b, int m, int n, int k, int count = 1) {
  char text[96];
  snprintf(text, sizeof text, "%c%c %dx%dx%d x%d", a == CUBLAS_OP_N ? 'n' : 't', b == CUBLAS_OP_N ? 'n' : 't', m, n, k,
           count);
  return text;
}

}  // namespace

NULL_CUDA_API cublasStatus_t cublasCreate_v2(cublasHandle_t *out) {
  return give<cublasStatus_t>(out, new cublasContext);
}

NULL_CUDA_API cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

NULL_CUDA_API cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  return give<cublasStatus_t>(&handle->stream, stream);
}

NULL_CUDA_API cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void *, size_t) { return CUBLAS_STATUS_SUCCESS; }
NULL_CUDA_API cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }

NULL_CUDA_API cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  return give<cublasStatus_t>(&handle->math, mode);
}

NULL_CUDA_API cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
  return give<cublasStatus_t>(mode, handle->math);
}

NULL_CUDA_API cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  return give<cublasStatus_t>(&handle->pointers, mode);
}

NULL_CUDA_API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
  return give<cublasStatus_t>(mode, handle->pointers);
}

#define NULL_CUDA_GEMM(name, type)                                                                                   \
  NULL_CUDA_API cublasStatus_t name(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m, int n,   \
                                    int k, const type *, const type *, int, const type *, int, const type *, type *, \
                                    int) {                                                                           \
    return launch(handle, #name, shape(a, b, m, n, k));                                                              \
  }
NULL_CUDA_GEMM(cublasSgemm_v2, float)
NULL_CUDA_GEMM(cublasDgemm_v2, double)
NULL_CUDA_GEMM(cublasCgemm_v2, cuComplex)
NULL_CUDA_GEMM(cublasZgemm_v2, cuDoubleComplex)
#undef NULL_CUDA_GEMM

#define NULL_CUDA_BATCHED(name, type)                                                                                \
  NULL_CUDA_API cublasStatus_t name(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m, int n,   \
                                    int k, const type *, const type *, int, long long, const type *, int, long long, \
                                    const type *, type *, int, long long, int count) {                               \
    return launch(handle, #name, shape(a, b, m, n, k, count));                                                       \
  }
NULL_CUDA_BATCHED(cublasSgemmStridedBatched, float)
NULL_CUDA_BATCHED(cublasDgemmStridedBatched, double)
NULL_CUDA_BATCHED(cublasCgemmStridedBatched, cuComplex)
NULL_CUDA_BATCHED(cublasZgemmStridedBatched, cuDoubleComplex)
#undef NULL_CUDA_BATCHED

NULL_CUDA_API cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m, int n,
                                          int k, const void *, const void *, cudaDataType, int, const void *,
                                          cudaDataType, int, const void *, void *, cudaDataType, int,
                                          cublasComputeType_t, cublasGemmAlgo_t) {
  return launch(handle, "cublasGemmEx", shape(a, b, m, n, k));
}

NULL_CUDA_API cublasStatus_t cublasSgemmEx(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m,
                                           int n, int k, const float *, const void *, cudaDataType, int, const void *,
                                           cudaDataType, int, const float *, void *, cudaDataType, int) {
  return launch(handle, "cublasSgemmEx", shape(a, b, m, n, k));
}

NULL_CUDA_API cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b,
                                                        int m, int n, int k, const void *, const void *, cudaDataType,
                                                        int, long long, const void *, cudaDataType, int, long long,
                                                        const void *, void *, cudaDataType, int, long long, int count,
                                                        cublasComputeType_t, cublasGemmAlgo_t) {
  return launch(handle, "cublasGemmStridedBatchedEx", shape(a, b, m, n, k, count));
}

#define NULL_CUDA_GEMV(name, type)                                                                          \
  NULL_CUDA_API cublasStatus_t name(cublasHandle_t handle, cublasOperation_t a, int m, int n, const type *, \
                                    const type *, int, const type *, int, const type *, type *, int) {      \
    return launch(handle, #name, shape(a, CUBLAS_OP_N, m, n, 1));                                           \
  }
NULL_CUDA_GEMV(cublasSgemv_v2, float)
NULL_CUDA_GEMV(cublasDgemv_v2, double)
#undef NULL_CUDA_GEMV

NULL_CUDA_API cublasStatus_t cublasSdot_v2(cublasHandle_t handle, int n, const float *, int, const float *, int,
                                           float *) {
  return launch(handle, "cublasSdot", std::to_string(n));
}

NULL_CUDA_API cublasStatus_t cublasDdot_v2(cublasHandle_t handle, int n, const double *, int, const double *, int,
                                           double *) {
  return launch(handle, "cublasDdot", std::to_string(n));
}

NULL_CUDA_API cublasStatus_t cublasDotEx(cublasHandle_t handle, int n, const void *, cudaDataType, int, const void *,
                                         cudaDataType, int, void *, cudaDataType, cudaDataType) {
  return launch(handle, "cublasDotEx", std::to_string(n));
}
