// cuBLASLt: its descriptors are opaque. Those here hold nothing, except that a layout knows its rows and columns.

struct __half;
struct __nv_bfloat16;
#include <cublasLt.h>

#include <string>

#include "library.h"

namespace {

template <typename Opaque>
cublasStatus_t make(Opaque **out) {
  *out = new Opaque{};
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Opaque>
cublasStatus_t destroy(Opaque *it) {
  delete it;
  return CUBLAS_STATUS_SUCCESS;
}

std::string size(cublasLtMatrixLayout_t matrix) {
  return std::to_string(matrix->data[0]) + "x" + std::to_string(matrix->data[1]);
}

}  // namespace

NULL_CUDA_API size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

NULL_CUDA_API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t, cudaDataType_t) {
  return make(out);
}
NULL_CUDA_API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  return destroy(description);
}
NULL_CUDA_API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
                                                            const void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

NULL_CUDA_API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) { return make(out); }
NULL_CUDA_API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy(preference);
}
NULL_CUDA_API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                                  cublasLtMatmulPreferenceAttributes_t, const void *,
                                                                  size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

NULL_CUDA_API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType, uint64_t rows,
                                                        uint64_t columns, int64_t) {
  make(out);
  (*out)->data[0] = rows;
  (*out)->data[1] = columns;
  return CUBLAS_STATUS_SUCCESS;
}
NULL_CUDA_API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy(layout); }
NULL_CUDA_API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
                                                              const void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

// There is one algorithm for everything.
NULL_CUDA_API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                                            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                            cublasLtMatmulPreference_t, int requested,
                                                            cublasLtMatmulHeuristicResult_t *results, int *returned) {
  *returned = requested < 1 ? 0 : 1;
  if (*returned == 0) return CUBLAS_STATUS_SUCCESS;
  results[0] = {};
  results[0].state = CUBLAS_STATUS_SUCCESS;
  results[0].wavesCount = 1;
  return CUBLAS_STATUS_SUCCESS;
}

NULL_CUDA_API cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                                            cublasLtMatrixLayout_t a, const void *, cublasLtMatrixLayout_t b,
                                            const void *, const void *, cublasLtMatrixLayout_t, void *,
                                            cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *, void *, size_t,
                                            cudaStream_t stream) {
  const std::string details = size(a) + " " + size(b) + " " + size(d);
  const bool is_done = null_cuda_library_call("cublasLtMatmul", stream, details.c_str()) == 0;
  return is_done ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
