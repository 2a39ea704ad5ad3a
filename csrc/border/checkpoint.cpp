// Access to what checkpoints contain: the bytes of tensors, and the states of random number generators.

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <mutex>
#include <vector>

#include "border/guarded.h"
#include "gradients/storage.h"

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

// What libtorch's generator for the CPU saves. The first 5048 bytes are the state of PyTorch before 1.3, whose cached
// number is computed from the three `normal` fields.
struct CpuState {
  uint64_t seed;
  int32_t left;
  int32_t seeded;
  uint64_t next;
  uint64_t words[at::MERSENNE_STATE_N];
  double normal_x;
  double normal_y;
  double normal_rho;
  int32_t has_normal;
  int32_t padding;
  float float_normal;
  uint8_t has_float_normal;
};

constexpr size_t kOldCpuState = offsetof(CpuState, float_normal);
static_assert(kOldCpuState == 5048 && sizeof(CpuState) == 5056, "the states of libtorch have these sizes");

// What the generators of CUDA save: a seed, and an offset that may be missing.
struct CudaState {
  uint64_t seed;
  int64_t offset;
};

// More than the size of any generator's state.
constexpr int64_t kMostStateBytes = 1 << 16;

// No draw in double precision is farther than 8.6 standard deviations from zero.
bool can_be_normal(double value) { return std::abs(value) < 9; }

// Whether a run can have this state of a Mersenne twister. libtorch checks each count by itself, but its draws read the
// words at `next` until `left` has counted down, wherever that is.
bool can_be_reached(const CpuState &state, bool is_old) {
  constexpr int32_t kWords = at::MERSENNE_STATE_N;
  const bool is_new = state.left == 1 && state.next == 0;
  const bool is_within =
      state.left >= 1 && state.left <= kWords && state.next == static_cast<uint64_t>(kWords + 1 - state.left);
  const bool are_words = std::all_of(std::begin(state.words), std::end(state.words),
                                     [](uint64_t word) { return word <= std::numeric_limits<uint32_t>::max(); });
  const bool are_flags = (state.has_normal & ~1) == 0 && (state.has_float_normal & ~1) == 0;
  const bool is_normal = is_old ? can_be_normal(state.normal_rho) && state.normal_x >= 0 && state.normal_x <= 1
                                : can_be_normal(state.normal_y);
  return state.seeded == 1 && (is_new || is_within) && are_words && are_flags && (is_normal || state.has_normal == 0) &&
         (can_be_normal(state.float_normal) || state.has_float_normal == 0);
}

// Checks the fields of a state against each other. libtorch itself refuses states of other sizes.
void check(const at::Generator &gen, const std::vector<uint8_t> &bytes) {
  if (gen.device().is_cpu() && (bytes.size() == sizeof(CpuState) || bytes.size() == kOldCpuState)) {
    CpuState state{};
    std::memcpy(&state, bytes.data(), bytes.size());
    TORCH_CHECK(can_be_reached(state, bytes.size() == kOldCpuState),
                "RNG state is damaged: no generator for the CPU can have these numbers");
  }
  if (gen.device().is_cuda() && bytes.size() == sizeof(CudaState)) {
    CudaState state{};
    std::memcpy(&state, bytes.data(), bytes.size());
    TORCH_CHECK(state.offset >= 0 && state.offset % 4 == 0,
                "RNG state is damaged: the offset of a CUDA generator must be a multiple of 4");
  }
}

// Checks a copy of a state, which nothing can change meanwhile, and sets it.
void set_state(at::Generator &gen, const Tensor &state) {
  TORCH_CHECK(state.defined() && state.is_cpu() && tamp::has_own_numbers(state) && state.scalar_type() == at::kByte,
              "RNG state must be a torch.ByteTensor");
  TORCH_CHECK(state.is_contiguous(), "RNG state must be contiguous");
  TORCH_CHECK(state.numel() <= kMostStateBytes, "RNG state is wrong size");
  std::vector<uint8_t> bytes(static_cast<size_t>(state.numel()));
  if (!bytes.empty()) std::memcpy(bytes.data(), state.const_data_ptr(), bytes.size());
  check(gen, bytes);
  gen.set_state(at::from_blob(bytes.data(), {state.numel()}, at::TensorOptions(at::kByte)));
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
