#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "devices.h"
#include "settings.h"

namespace simulated {
namespace {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(/*is_cuda=*/true));
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  // On the CPU, uint8: 8 bytes of seed, and 8 of offset, which may be missing.
  void set_state(const c10::TensorImpl &state) override {
    TORCH_CHECK_TYPE(state.layout() == at::kStrided && state.device_type() == at::kCPU && state.dtype() == at::kByte,
                     "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(state.is_contiguous(), "RNG state must be contiguous");
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    const auto *bytes = static_cast<const char *>(state.data());
    memcpy(&seed_, bytes, 8);
    offset_ = 0;
    if (state.numel() == 16) memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor out = at::empty({16}, at::TensorOptions(at::kByte).device(at::kCPU));
    auto *bytes = static_cast<char *>(out.data_ptr());
    memcpy(bytes, &seed_, 8);
    memcpy(bytes + 8, &offset_, 8);
    return out.getIntrusivePtr();
  }
  Generator *clone_impl() const override {
    auto *out = new Generator(device_.index());
    out->seed_ = seed_;
    out->offset_ = offset_;
    return out;
  }

  // Seeds a generator of the CPU for each kernel (SplitMix64's finalizer; Steele, Lea and Flood 2014).
  at::Generator next() {
    const std::lock_guard<std::mutex> lock(mutex_);
    offset_ += 4;
    uint64_t x = seed_ + offset_ * 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return at::detail::createCPUGenerator(x ^ (x >> 31));
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

}  // namespace

const at::Generator &default_generator(c10::DeviceIndex device) {
  static const auto *const all = [] {
    auto *out = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) out->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    return out;
  }();
  return all->at(static_cast<size_t>(device < 0 ? current_device() : device));
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

at::Generator numbers_of(const at::Generator &generator) {
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<Generator *>(generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace simulated
