// What this libtorch can run on.

#include <ATen/Context.h>

#include "guarded.h"

#ifdef TAMP_WITH_CUDA
namespace at::cuda {
int warp_size();
}

// The linker drops a library that nothing refers to, and then a program built against a CUDA libtorch has no CUDA. A
// constructor is never dropped, and this one names a symbol that only libtorch_cuda defines. It calls nothing.
__attribute__((constructor)) static void tamp_keep_cuda() {
  int (*volatile symbol)() = &at::cuda::warp_size;
  (void)symbol;
}
#endif

extern "C" {

void tamp_string_free(char *text) noexcept { free(text); }

char *tamp_string_new(const char *text) noexcept { return tamp::message(text); }

uint8_t tamp_cuda_is_linked(void) noexcept {
#ifdef TAMP_WITH_CUDA
  return 1;
#else
  return 0;
#endif
}

void tamp_cuda_initialize(char **err) noexcept {
  tamp::guarded(err, [] { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); });
}

}  // extern "C"
