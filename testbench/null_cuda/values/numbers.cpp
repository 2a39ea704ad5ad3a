#include "numbers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
// The state of a generator during a capture is private.
#define private public
#include <ATen/cuda/CUDAGeneratorImpl.h>
#undef private

#include <mutex>

#include "../null_cuda.h"

namespace null_cuda {
namespace {

uint64_t seed_at(uint64_t seed, uint64_t offset) { return seed + offset * 0x9e3779b97f4a7c15; }

uint64_t read(const at::TensorBase &number) {
  const void *memory = null_cuda_host_view(number.const_data_ptr(), sizeof(int64_t));
  return static_cast<uint64_t>(*static_cast<const int64_t *>(memory));
}

bool is_capturing() { return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }

at::CUDAGeneratorState &state_of(const at::Generator &generator) {
  return *static_cast<at::CUDAGeneratorImpl *>(generator.unsafeGetGeneratorImpl())->state_;
}

at::Generator &cpu() {
  static at::Generator *const generator = new at::Generator(at::detail::getDefaultCPUGenerator());
  return *generator;
}

}  // namespace

Numbers::Numbers(const std::optional<at::Generator> &given, c10::Device device)
    : generator_(at::make_generator<at::CPUGeneratorImpl>()) {
  const at::Generator used = given ? *given : at::globalContext().defaultGenerator(device);
  const c10::DeviceGuard guard(device);
  if (!is_capturing()) {
    generator_.set_current_seed(seed_at(used.current_seed(), used.get_offset()));
    return;
  }
  auto &state = state_of(used);
  const std::lock_guard<std::mutex> lock(state.capture_states_mutex_);
  uint64_t latest = 0;
  for (const auto &[id, capture] : state.capture_states_) {
    if (id < latest || !capture->is_initialized()) continue;
    latest = id;
    seed_ = capture->rng_state_seed_extragraph_;
    offset_ = capture->rng_state_offset_extragraph_;
    in_graph_ = capture->offset_intragraph_;
  }
}

void Numbers::begin() {
  if (seed_.defined()) generator_.set_current_seed(seed_at(read(seed_), read(offset_) + in_graph_));
}

DefaultNumbers::DefaultNumbers(const std::optional<at::Generator> &generator) {
  if (!generator) return;
  kept_ = cpu().get_state();
  cpu().set_state(generator->get_state());
}

DefaultNumbers::~DefaultNumbers() {
  if (kept_.defined()) cpu().set_state(at::Tensor(kept_));
}

}  // namespace null_cuda
