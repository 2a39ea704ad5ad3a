// Failures that cannot be provoked otherwise, for the crate's own tests in debug builds.

#ifdef TAMP_WITH_TESTING

#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>

#include "border/guarded.h"

namespace {

thread_local int64_t countdown = 0;
thread_local uint8_t exception = 0;
thread_local bool other_device = false;
thread_local std::optional<c10::InferenceMode> inference;

}  // namespace

namespace tamp {

void fail_point() {
  if (countdown == 0 || --countdown != 0) return;
  if (exception == TAMP_TESTING_BAD_ALLOC) throw std::bad_alloc();
  if (exception == TAMP_TESTING_INT) throw 42;
  TORCH_CHECK(false, "a planted failure");
}

bool cpu_is_other_device() { return other_device; }

bool planted(const char *fault) {
  static const char *const asked = std::getenv("TCH_AMP_PLANTED_FAULT");
  return asked != nullptr && std::strcmp(asked, fault) == 0;
}

}  // namespace tamp

extern "C" {

int64_t tamp_testing_fail_at(int64_t call, uint8_t kind) noexcept {
  const int64_t before = countdown;
  countdown = call;
  exception = kind;
  return before;
}

void tamp_testing_fault(uint8_t kind) noexcept {
  volatile int zero = 0;
  if (kind == TAMP_TESTING_OVERFLOW) {
    const std::unique_ptr<char[]> memory(new char[8]);
    char *volatile unknown = memory.get();  // a compiler that knew the size would warn about the next line
    unknown[8 + zero] = 1;
  } else if (kind == TAMP_TESTING_FREED) {
    const at::Tensor tensor = at::zeros({4});
    volatile float *memory = tensor.mutable_data_ptr<float>();
    tensor.unsafeGetTensorImpl()->release_resources();
    memory[zero] = 1;
  } else if (kind == TAMP_TESTING_UNDEFINED) {
    volatile int largest = std::numeric_limits<int>::max();
    largest = largest + 1;
  } else {
    void *volatile lost = std::malloc(1234);
    lost = nullptr;
    (void)lost;
  }
}

void tamp_testing_as_other_device(uint8_t enabled) noexcept { other_device = enabled != 0; }

void tamp_testing_inference_mode(uint8_t enabled) noexcept {
  if (enabled != 0) {
    inference.emplace(true);
  } else {
    inference.reset();
  }
}

}  // extern "C"

#endif  // TAMP_WITH_TESTING
