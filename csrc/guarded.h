// A C++ exception becomes a message: none leaves the shim.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "shim.h"

namespace tamp {

// A message for the other side. Without memory for it the failure would look like a success, so that is the end.
inline char *message(const char *text) {
  char *copy = strdup(text);
  if (copy == nullptr) std::abort();
  return copy;
}

#ifdef TAMP_TESTING
// Throws when a test has asked for it (csrc/testing.cpp).
void fail_point();
// Whether a test wants the CPU to be treated as another device.
bool cpu_is_other_device();
// Whether TCH_AMP_PLANTED_FAULT names this fault, which the tests on simulated GPUs have to notice.
bool planted(const char *fault);
#else
inline void fail_point() {}
inline bool cpu_is_other_device() { return false; }
inline bool planted(const char *) { return false; }
#endif

// Runs `body`; when it throws, writes the message to `err` and returns zero, null or nothing.
template <typename F>
auto contained(char **err, F &&body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const c10::Error &e) {
    // what() would symbolise a C++ backtrace, which takes milliseconds and says nothing to a Rust program.
    *err = message(e.what_without_backtrace());
  } catch (const std::exception &e) {
    *err = message(e.what());
  } catch (...) {
    *err = message("unknown C++ exception");
  }
  return decltype(body())();
}

// The body of a function that can fail.
template <typename F>
auto guarded(char **err, F &&body) noexcept -> decltype(body()) {
  return contained(err, [&]() -> decltype(body()) {
    fail_point();
    return body();
  });
}

inline at::Tensor &tensor(tamp_tensor *t) {
  TORCH_CHECK(t != nullptr, "null tensor pointer");
  return *reinterpret_cast<at::Tensor *>(t);
}

inline const at::Tensor &tensor(const tamp_tensor *t) {
  TORCH_CHECK(t != nullptr, "null tensor pointer");
  return *reinterpret_cast<const at::Tensor *>(t);
}

// The gradient of a parameter, perhaps undefined, read without a trace: mutable_grad() would make room for one.
inline const at::Tensor &gradient(const at::Tensor &parameter) {
  return static_cast<const c10::TensorImpl *>(parameter.unsafeGetTensorImpl())->grad();
}

inline tamp_tensor *give(std::unique_ptr<at::Tensor> t) noexcept {
  return reinterpret_cast<tamp_tensor *>(t.release());
}

inline tamp_tensor *give(at::Tensor t) { return give(std::make_unique<at::Tensor>(std::move(t))); }

// What the other side gave, as one of ours again.
inline at::Tensor take(tamp_tensor *t) {
  const std::unique_ptr<at::Tensor> given(reinterpret_cast<at::Tensor *>(t));
  return std::move(*given);
}

// A tensor on `device`. The host waits only when it is going to read the copy: one that is still on its way to host
// memory looks like any other there.
inline at::Tensor on_device(const at::Tensor &t, at::Device device) {
  return t.to(device, /*non_blocking=*/!device.is_cpu());
}

}  // namespace tamp
