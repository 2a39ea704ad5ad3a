// The border between Rust and C++: exceptions become messages, so that none leaves the shim, and pointers become
// tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "border/regions.h"
#include "border/shim.h"

namespace tamp {

// Returns a message for the Rust side. Aborts if there is no memory for it, because the failure would look like a
// success.
inline char *message(const char *text) {
  char *copy = strdup(text);
  if (copy == nullptr) std::abort();
  return copy;
}

#ifdef TAMP_WITH_TESTING
// Throws if a test asked for it; see testing.cpp.
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

// Runs `body`. If it throws, writes the message to `err` and returns zero, null or nothing.
template <typename F>
auto contained(char **err, F &&body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const c10::Error &e) {
    // what() would symbolize a C++ backtrace, which takes milliseconds and is of no use to a Rust program.
    *err = message(e.what_without_backtrace());
  } catch (const std::exception &e) {
    *err = message(e.what());
  } catch (...) {
    *err = message("unknown C++ exception");
  }
  return decltype(body())();
}

// Runs the body of a function that can fail, outside of the program's autocast regions. Tests make it fail here.
template <typename F>
auto guarded(char **err, F &&body) noexcept -> decltype(body()) {
  return contained(err, [&]() -> decltype(body()) {
    const OutsideRegions own;
    fail_point();
    return body();
  });
}

// The same for a body that belongs to the program: it reads or changes the regions, or runs code of the program. It is
// in the program's regions, whoever calls it. tests/abi.rs lists the functions with such a body.
template <typename F>
auto guarded_inside_regions(char **err, F &&body) noexcept -> decltype(body()) {
  return contained(err, [&]() -> decltype(body()) {
    const InsideRegions programs;
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

// Returns the gradient of a parameter, which may be undefined. mutable_grad() would allocate room for one.
inline const at::Tensor &gradient(const at::Tensor &parameter) {
  return static_cast<const c10::TensorImpl *>(parameter.unsafeGetTensorImpl())->grad();
}

inline tamp_tensor *give(std::unique_ptr<at::Tensor> t) noexcept {
  return reinterpret_cast<tamp_tensor *>(t.release());
}

inline tamp_tensor *give(at::Tensor t) { return give(std::make_unique<at::Tensor>(std::move(t))); }

// Takes ownership of a tensor that the Rust side gave away.
inline at::Tensor take(tamp_tensor *t) {
  const std::unique_ptr<at::Tensor> given(reinterpret_cast<at::Tensor *>(t));
  return std::move(*given);
}

// Returns a tensor on `device`. Does not synchronize for a CUDA device. A copy to host memory could be read before it is
// complete, and other devices may read the memory of `t` later.
inline at::Tensor on_device(const at::Tensor &t, at::Device device) {
  return t.to(device, /*non_blocking=*/device.is_cuda());
}

}  // namespace tamp
