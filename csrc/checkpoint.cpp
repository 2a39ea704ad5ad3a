// Access to what checkpoints contain: the bytes of tensors, and the states of random number generators.

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <mutex>

#include "guarded.h"
#include "memory.h"

namespace {

using at::Tensor;

// Returns a one-dimensional view of the elements from `first` on that fill `len` bytes.
Tensor range(const Tensor &t, int64_t first, size_t len) {
  TORCH_CHECK(tamp::has_own_numbers(t) && t.is_contiguous(),
              "only the bytes of a contiguous tensor can be read or written");
  const auto bytes = static_cast<int64_t>(len);
  const auto size = static_cast<int64_t>(t.element_size());
  TORCH_CHECK(bytes % size == 0 && first >= 0 && bytes / size <= t.numel() && first <= t.numel() - bytes / size,
              "a range of elements outside the tensor");
  return t.detach().view({-1}).narrow(0, first, bytes / size);
}

Tensor over(void *memory, const Tensor &like) {
  return at::from_blob(memory, {like.numel()}, like.options().device(at::kCPU).requires_grad(false));
}

at::Generator generator(int8_t device_type, int8_t index) {
  return at::globalContext().defaultGenerator(at::Device(static_cast<c10::DeviceType>(device_type), index));
}

void set_state(at::Generator &gen, const Tensor &state) {
  // The CPU's generator counts the offset of a view in states instead of bytes, and reads outside of the memory.
  gen.set_state(state.storage_offset() == 0 ? state : state.clone());
}

}  // namespace

extern "C" {

void tamp_elements_read(const tamp_tensor *from, int64_t first, uint8_t *to, size_t len, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    if (len == 0) return;
    if (tamp::tensor(from)._is_zerotensor()) {
      std::memset(to, 0, len);
      return;
    }
    const Tensor elements = range(tamp::tensor(from), first, len);
    if (elements.is_cpu()) {
      std::memcpy(to, elements.const_data_ptr(), len);
    } else {
      over(to, elements).copy_(elements);
    }
  });
}

void tamp_elements_write(tamp_tensor *to, int64_t first, const uint8_t *from, size_t len, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    if (len == 0) return;
    Tensor elements = range(tamp::tensor(to), first, len);
    elements.copy_(over(const_cast<uint8_t *>(from), elements));  // the memory is only read
  });
}

tamp_tensor *tamp_rng_state(int8_t device_type, int8_t index, char **err) noexcept {
  return tamp::guarded(err, [&] {
    at::Generator gen = generator(device_type, index);
    const std::lock_guard<std::mutex> lock(gen.mutex());
    return tamp::give(gen.get_state());
  });
}

void tamp_rng_set_state(int8_t device_type, int8_t index, const tamp_tensor *state, char **err) noexcept {
  tamp::guarded(err, [&] {
    at::Generator gen = generator(device_type, index);
    const std::lock_guard<std::mutex> lock(gen.mutex());
    set_state(gen, tamp::tensor(state));
  });
}

void tamp_rng_check_state(int8_t device_type, int8_t index, const tamp_tensor *state, char **err) noexcept {
  tamp::guarded(err, [&] {
    at::Generator gen = generator(device_type, index);
    std::unique_lock<std::mutex> lock(gen.mutex());
    at::Generator copy = gen.clone();
    lock.unlock();
    set_state(copy, tamp::tensor(state));
  });
}

}  // extern "C"
