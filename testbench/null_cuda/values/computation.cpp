#include "computation.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <unordered_set>

#include "../null_cuda.h"
#include "operators.h"
#include "semantics.h"
#include "views.h"

namespace null_cuda {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

// Neither the copies nor the kernels are operations of the program.
struct Plain {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  const at::DisableRecordFunctionGuard unrecorded;
};

void say_once(const std::string &what) {
  static std::mutex mutex;
  static auto *const said = new std::unordered_set<std::string>;
  const std::lock_guard<std::mutex> guard(mutex);
  if (said->insert(what).second) fprintf(stderr, "null CUDA: not computed: %.300s\n", what.c_str());
}

std::string first_line(const std::exception &error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

bool is_sparse(const IValue &value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_sparse();
}

bool is_half(const Tensor &t) { return t.defined() && simulated::is_half(t.scalar_type()); }

}  // namespace

Computation::Computation(const c10::OperatorHandle &op, const Stack &stack) : op_(op), name_(simulated::name_of(op)) {
  const auto &arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto *alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) prepare_written(stack[first + i]);
  }
  for (size_t i = 0; i < arguments.size(); ++i) arguments_.push_back(host_argument(stack[first + i], arguments[i]));
  const bool draws = simulated::is_one_of(name_, "native_dropout _fused_dropout");
  if (draws) default_numbers_ = numbers(std::nullopt);
}

bool Computation::is_given(const Tensor &t) const {
  return std::any_of(hosts_.begin(), hosts_.end(), [&](const auto &pair) { return pair.first.is_same(t); });
}

void Computation::prepare_written(const IValue &value) {
  simulated::for_each_tensor(value, [&](const Tensor &t) {
    if (!is_dense_cuda(t) || is_given(t)) return;
    const Tensor before = view_of(t);
    const Tensor copy = at::empty_strided(t.sizes(), t.strides(), before.options());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    written_.push_back({t, before, copy, Tensor()});
    hosts_.emplace_back(t, copy);
  });
}

Tensor Computation::host(const Tensor &t) {
  if (!t.defined() || !t.is_cuda()) return t;
  if (!device_) device_ = t.device();
  if (!t.is_sparse() && !is_dense_cuda(t)) return t;
  for (const auto &[there, here] : hosts_) {
    if (there.is_same(t)) return here;
  }
  hosts_.emplace_back(t, t.is_sparse() ? view_of_sparse(t) : view_of(t));
  return hosts_.back().second;
}

at::Generator Computation::numbers(const std::optional<at::Generator> &generator) {
  const auto current = static_cast<c10::DeviceIndex>(null_cuda_current_device());
  numbers_.emplace_back(generator, device_.value_or(c10::Device(c10::kCUDA, current)));
  return numbers_.back().generator();
}

IValue Computation::host_argument(const IValue &value, const c10::Argument &argument) {
  const std::string type = argument.type()->str();
  if (simulated::has_tensors(value, type)) {
    return simulated::map_tensors(value, [&](const Tensor &t) { return host(t); });
  }
  if (value.isDevice()) {
    if (!device_ && value.toDevice().is_cuda()) device_ = value.toDevice();
    return c10::Device(c10::kCPU);
  }
  if (type.find("Generator") != std::string::npos) {
    return numbers(value.isGenerator() ? std::make_optional(value.toGenerator()) : std::nullopt);
  }
  return value;
}

void Computation::see(const Tensor &t, size_t result, std::optional<size_t> index) {
  if (!is_dense_cuda(t)) return;
  if (!device_) device_ = t.device();
  if (!is_given(t)) fresh_.push_back({result, index, view_of(t)});
}

void Computation::see_results(const Stack &stack) {
  const size_t count = op_.schema().returns().size(), first = stack.size() - count;
  for (size_t i = 0; i < count; ++i) {
    const IValue &value = stack[first + i];
    if (value.isTensor()) see(value.toTensor(), i, std::nullopt);
    if (!value.isTensorList()) continue;
    const auto list = value.toTensorVector();
    for (size_t j = 0; j < list.size(); ++j) see(list[j], i, j);
  }
  // The given tensors may have other sizes now.
  for (auto &each : written_) each.after = view_of(each.given);
}

void Computation::snapshot() {
  const Plain plain;
  for (auto &each : written_) {
    // The kernel of an earlier replay may have given the copy other sizes.
    if (each.copy.sizes() != each.before.sizes()) each.copy.resize_(each.before.sizes());
    each.copy.copy_(each.before);
  }
}

Stack Computation::run(Stack stack) const {
  const bool sparse = std::any_of(stack.begin(), stack.end(), is_sparse);
  const c10::DispatchKeySet key(sparse ? c10::DispatchKey::SparseCPU : c10::DispatchKey::CPU);
  const simulated::Call call{op_.schema(), name_, stack, 0};
  simulated::compute(call, [&] { op_.redispatchBoxed(key, &stack); });
  return stack;
}

// Kernels of the CPU refuse some half numbers, or combine them with f32 otherwise than CUDA's.
Stack Computation::run_in_f32() const {
  std::vector<std::pair<Tensor, Tensor>> wide;
  const auto widen = [&](const Tensor &t) {
    if (!is_half(t)) return t;
    for (const auto &[narrow, known] : wide) {
      if (narrow.is_same(t)) return known;
    }
    wide.emplace_back(t, t.to(at::kFloat));
    return wide.back().second;
  };
  Stack stack;
  for (const auto &value : arguments_) {
    stack.push_back(value.isTensor() || value.isTensorList() ? simulated::map_tensors(value, widen) : value);
  }
  Stack out = run(std::move(stack));
  for (const auto &each : written_) {
    for (const auto &[narrow, computed] : wide) {
      if (narrow.is_same(each.copy)) each.copy.copy_(computed);
    }
  }
  return out;
}

bool Computation::has_half_numbers() const {
  bool any = false;
  for (const auto &value : arguments_) {
    simulated::for_each_tensor(value, [&](const Tensor &t) { any = any || is_half(t); });
  }
  return any;
}

void Computation::write(const Stack &results) {
  for (auto &each : written_) {
    if (each.after.defined() && each.after.sizes() == each.copy.sizes()) each.after.copy_(each.copy);
  }
  for (auto &each : fresh_) {
    const IValue &value = results.at(each.result);
    const Tensor result = each.index ? value.toTensorVector().at(*each.index) : value.toTensor();
    if (result.defined() && result.sizes() == each.memory.sizes()) each.memory.copy_(result);
  }
}

void Computation::compute() {
  const Plain plain;
  for (auto &each : numbers_) each.begin();
  const DefaultNumbers numbers(default_numbers_);
  results_.clear();
  try {
    try {
      results_ = run(Stack(arguments_.begin(), arguments_.end()));
    } catch (const std::exception &) {
      if (!has_half_numbers()) throw;
      results_ = run_in_f32();
    }
    write(results_);
  } catch (const std::exception &error) {
    say_once(name_ + ": " + first_line(error));
  }
}

IValue Computation::replaced(const IValue &real, const IValue &computed) const {
  if (!real.isTensor() || !computed.isTensor()) return real.isTensor() || real.isTensorList() ? real : computed;
  const Tensor &t = real.toTensor(), &cpu = computed.toTensor();
  if (!cpu.defined() || !t.defined() || !t.is_cuda() || is_given(t)) return real;
  const bool has_other_size = is_dense_cuda(t) && t.sizes() != cpu.sizes();
  return cpu.is_sparse() || has_other_size ? to_device(cpu, *device_) : real;
}

void Computation::replace_results(Stack &stack) {
  if (results_.empty()) return;
  const size_t count = op_.schema().returns().size(), first = stack.size() - count;
  for (size_t i = 0; i < count; ++i) stack[first + i] = replaced(stack[first + i], results_[i]);
}

void Computation::forget() {
  results_.clear();
  hosts_.clear();
  for (auto &each : written_) each.given.reset();
}

void Computation::push_results(Stack &stack) {
  TORCH_CHECK(!results_.empty(), "null CUDA: ", name_, " cannot be computed");
  for (const IValue &value : results_) {
    stack.push_back(value.isTensor() ? IValue(to_device(value.toTensor(), *device_)) : value);
  }
}

}  // namespace null_cuda
