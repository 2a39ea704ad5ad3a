// The compiler of kernels at run time. It compiles nothing: a "binary" is the name of the program.

#include <nvrtc.h>

#include <cstring>
#include <string>

#include "library.h"

using null_cuda::give;

struct _nvrtcProgram {
  std::string name;
};

NULL_CUDA_API const char *nvrtcGetErrorString(nvrtcResult result) {
  return result == NVRTC_SUCCESS ? "NVRTC_SUCCESS" : "NVRTC_ERROR_INTERNAL_ERROR";
}

NULL_CUDA_API nvrtcResult nvrtcVersion(int *major, int *minor) {
  *major = 13;
  *minor = 0;
  return NVRTC_SUCCESS;
}

NULL_CUDA_API nvrtcResult nvrtcCreateProgram(nvrtcProgram *out, const char *, const char *name, int,
                                             const char *const *, const char *const *) {
  return give<nvrtcResult>(out, new _nvrtcProgram{name != nullptr ? name : ""});
}

NULL_CUDA_API nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) {
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}

NULL_CUDA_API nvrtcResult nvrtcAddNameExpression(nvrtcProgram, const char *) { return NVRTC_SUCCESS; }
NULL_CUDA_API nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, const char *const *) { return NVRTC_SUCCESS; }

NULL_CUDA_API nvrtcResult nvrtcGetLoweredName(nvrtcProgram, const char *expression, const char **lowered) {
  return give<nvrtcResult>(lowered, expression);
}

NULL_CUDA_API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *size) {
  return give<nvrtcResult>(size, program->name.size() + 1);
}

NULL_CUDA_API nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *out) {
  memcpy(out, program->name.c_str(), program->name.size() + 1);
  return NVRTC_SUCCESS;
}

NULL_CUDA_API nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *size) {
  return nvrtcGetCUBINSize(program, size);
}

NULL_CUDA_API nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *out) { return nvrtcGetCUBIN(program, out); }

NULL_CUDA_API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t *size) { return give<nvrtcResult>(size, 1); }

NULL_CUDA_API nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char *out) { return give<nvrtcResult>(out, 0); }
