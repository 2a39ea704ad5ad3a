// The kernels of the devices: every operator for which PyTorch has a CUDA kernel runs the CPU's on the same memory. One
// that has none there has none here, and fails with PyTorch's own words.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "arrivals.h"
#include "costs.h"
#include "counters.h"
#include "devices.h"
#include "mirror.h"
#include "random.h"
#include "semantics.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;

// Whether PyTorch's kernel refuses a number without dimensions on another device, too. By operator.
const std::unordered_map<std::string, bool> &device_checks() {
  static const auto *const it = new std::unordered_map<std::string, bool>{
#define SIMULATED_CUDA(name, check) {name, check},
#define SIMULATED_SPARSE_CUDA(name)
#include "operators.inc"
#undef SIMULATED_CUDA
#undef SIMULATED_SPARSE_CUDA
  };
  return *it;
}

// The device that a call runs on: that of its tensors, which must have one in common, or the one it names.
class Place {
 public:
  explicit Place(const Call &call) : call_(call) {
    const auto &arguments = call.schema.arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const IValue &value = call.stack[call.first + i];
      for_each_tensor(value, [&](const Tensor &t) { see(t, arguments[i].name()); });
      if (value.isDevice() && value.toDevice().is_cuda() && !device_) device_ = whole(value.toDevice());
    }
  }

  c10::Device device() const {
    if (device_ && device_->is_cuda()) return *device_;
    return first_cuda_.value_or(c10::Device(c10::kCUDA, current_device()));
  }

 private:
  void see(const Tensor &t, const std::string &argument) {
    if (!t.defined()) return;
    if (t.is_cuda() && !first_cuda_) first_cuda_ = t.device();
    if (t.is_cpu() && may_be_on_cpu(t)) return;
    if (!device_) {
      device_ = t.device();
      return;
    }
    // Lists are taken one by one where they lie on several devices.
    const bool any = call_.name.starts_with("_foreach_");
    TORCH_CHECK(any || *device_ == t.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
                t.device(), "! (when checking argument for argument ", argument, " in method simulated_CUDA_",
                call_.name, ")");
  }

  bool may_be_on_cpu(const Tensor &t) const {
    const auto found = device_checks().find(call_.name);
    const bool is_checked = found != device_checks().end() && found->second;
    const bool is_index = is_one_of(call_.name, "index index_put_ _index_put_impl_ _unsafe_index");
    return !is_checked && (t.dim() == 0 || is_index);
  }

  const Call &call_;
  std::optional<c10::Device> device_, first_cuda_;
};

// Gives each lazy copy that a call writes to memory of its own, as a kernel does that asks for memory to write to. The
// kernels for lists of tensors do not: they write to memory that they have asked for to read, and so to the original.
void end_lazy_copies(const Call &call) {
  for (const char *of_lists : {"_foreach_", "_fused_", "_amp_foreach_"}) {
    if (call.name.starts_with(of_lists)) return;
  }
  const auto &arguments = call.schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto *alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for_each_tensor(call.stack[call.first + i], [](const Tensor &t) {
      if (t.defined() && t.is_cuda() && t.has_storage()) (void)t.storage().mutable_data();
    });
  }
}

// Replaces what lies on a device by its mirror.
void arguments_to_host(const Call &call, Mirror &mirror, c10::Device device) {
  const auto &arguments = call.schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue &value = call.stack[call.first + i];
    const std::string type = arguments[i].type()->str();
    if (has_tensors(value, type)) {
      value = map_tensors(value, [&](const Tensor &t) { return t.defined() && t.is_cuda() ? mirror.host(t) : t; });
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (type.find("Generator") != std::string::npos) {
      value = numbers_of(value.isGenerator() ? value.toGenerator() : default_generator(device.index()));
    }
  }
}

void results_to_device(const Call &call, Mirror &mirror, c10::Device device) {
  const size_t count = call.schema.returns().size();
  for (size_t i = call.stack.size() - count; i < call.stack.size(); ++i) {
    IValue &value = call.stack[i];
    if (!value.isTensor() && !value.isTensorList()) continue;
    value = map_tensors(value, [&](const Tensor &t) { return mirror.device(t, device); });
  }
}

// Random kernels that take no generator draw from the CPU's default one, which gets the device's numbers meanwhile.
class DefaultNumbers {
 public:
  DefaultNumbers(const Call &call, c10::Device device) {
    if (!is_one_of(call.name, "native_dropout _fused_dropout")) return;
    kept_ = cpu().get_state();
    cpu().set_state(numbers_of(default_generator(device.index())).get_state());
  }
  DefaultNumbers(const DefaultNumbers &) = delete;
  DefaultNumbers &operator=(const DefaultNumbers &) = delete;
  ~DefaultNumbers() {
    if (kept_.defined()) cpu().set_state(kept_);
  }

 private:
  static at::Generator cpu() { return at::detail::getDefaultCPUGenerator(); }
  Tensor kept_;
};

template <DispatchKey Cpu>
void run(const c10::OperatorHandle &op, c10::DispatchKeySet, torch::jit::Stack *stack) {
  const std::string name = name_of(op);
  const Call call{op.schema(), name, *stack, stack->size() - op.schema().arguments().size()};
  const c10::Device device = Place(call).device();
  check(call);
  if (const int64_t count = launches(call); count > 0) note_launches(device.index(), name, count);
  if (waits(call)) {
    note_wait(device.index(), name == "_local_scalar_dense" ? Wait::kItem : Wait::kOperator, name);
    arrive_all();
  }
  end_lazy_copies(call);
  change_versions(call);
  Mirror mirror;
  arguments_to_host(call, mirror, device);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const DefaultNumbers numbers(call, device);
    compute(call, [&] { op.redispatchBoxed(c10::DispatchKeySet(Cpu), stack); });
  }
  mirror.settle();
  results_to_device(call, mirror, device);
}

// Attention is the composition of its parts: the fused kernels of CUDA have no twin on the CPU.
int64_t choose_composition(const Tensor &, const Tensor &, const Tensor &, const std::optional<Tensor> &, double, bool,
                           std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

const bool attention_is_composed = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_composition);
  return true;
}();

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
#define SIMULATED_CUDA(name, check) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run<DispatchKey::CPU>>());
#define SIMULATED_SPARSE_CUDA(name)
#include "operators.inc"
#undef SIMULATED_CUDA
#undef SIMULATED_SPARSE_CUDA
  // A composition that picks cuDNN's kernels; here it is one kernel.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run<DispatchKey::CPU>>());
}

TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
#define SIMULATED_CUDA(name, check)
#define SIMULATED_SPARSE_CUDA(name) \
  m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run<DispatchKey::SparseCPU>>());
#include "operators.inc"
#undef SIMULATED_CUDA
#undef SIMULATED_SPARSE_CUDA
}

}  // namespace
}  // namespace simulated
