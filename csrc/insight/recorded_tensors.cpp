// The tensors of an operator: what it was given and what it computed.

#include <algorithm>

#include "insight/recorder.h"

namespace tamp {
namespace {

using at::Tensor;
using c10::IValue;

void set_numbers(tamp_recorded_tensor &out, const std::optional<Numbers> &counted) {
  out.known = counted.has_value();
  if (!counted) return;
  out.positive_infinite = counted->positive_infinite;
  out.negative_infinite = counted->negative_infinite;
  out.nan = counted->nan;
  out.largest = counted->largest;
}

// A tensor without its numbers.
tamp_recorded_tensor describe(tamp_recording &recording, const Tensor &t, uint8_t use) {
  tamp_recorded_tensor out{};
  describe_layout(out, t);
  const Tensor part = dense_part(t);
  const std::lock_guard<std::mutex> lock(recording.mutex);
  const auto *memory = memory_of(recording, part);
  out.memory = memory == nullptr ? -1 : memory->number;
  out.parameter = memory == nullptr ? -1 : memory->parameter_at(part);
  // What has no storage has no place in one, and a nested tensor has many.
  const bool has_place = memory != nullptr && part.layout() == at::kStrided && !part.is_nested();
  out.offset = has_place ? part.storage_offset() : 0;
  out.version = t.is_inference() ? 0 : static_cast<int64_t>(t._version());
  out.elements = part.numel();
  out.usage = use;
  return out;
}

// The numbers of what an operator returned.
//
// They are counted each time, because kernels write to results without a new version, between the operators that they
// run and afterwards. Only an operator that does nothing but run others returns what the last of these has returned:
// one without a kernel of its own, or the call by which autocast repeats an operator on converted tensors.
std::optional<Numbers> numbers_of_result(tamp_recording &recording, const Tensor &t, bool passed_on) {
  const auto *impl = t.unsafeGetTensorImpl();
  if (passed_on) {
    const std::lock_guard<std::mutex> lock(recording.mutex);
    const auto found = recording.known.find(impl);
    if (found != recording.known.end()) return found->second.numbers;
  }
  const auto counted = count_numbers(t);
  const std::lock_guard<std::mutex> lock(recording.mutex);
  tamp_recording::Known entry{c10::weak_intrusive_ptr<c10::TensorImpl>(t.getIntrusivePtr()), counted};
  recording.known.insert_or_assign(impl, std::move(entry));
  return counted;
}

bool only_runs_others(const tamp_recording &recording, const Running &running) {
  if (running.op && running.op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return true;
  const auto &event = recording.events[running.event];
  if (event.raw.autocast < 0) return false;
  // The last event that began within this one.
  for (size_t i = recording.events.size(); i-- > static_cast<size_t>(running.event) + 1;) {
    const auto &inner = recording.events[i];
    if (inner.raw.thread == event.raw.thread && inner.raw.parent == running.event) {
      return inner.raw.name == event.raw.name;  // names are kept once
    }
  }
  return false;
}

// The node of a result that no argument had, which is what the operator has made.
const torch::autograd::Node *node_made(const Tensor &t, const Running &running) {
  if (!t.requires_grad() || t.grad_fn() == nullptr) return nullptr;
  const auto &node = t.grad_fn();
  const bool given = std::find(running.nodes.begin(), running.nodes.end(), node) != running.nodes.end();
  return given ? nullptr : node.get();
}

bool writes(const tamp_recorded_tensor &t) { return t.usage == TAMP_USE_WRITE || t.usage == TAMP_USE_OVERWRITE; }

// Counts the arguments that the operator reads and that satisfy a condition, unless they are counted already.
template <typename Condition>
void count_read(const std::vector<IValue> &arguments, std::vector<tamp_recorded_tensor> &inputs,
                const Condition &condition) {
  size_t place = 0;
  for (const IValue &argument : arguments) {
    for_each_tensor(argument, [&](const Tensor &t) {
      auto &input = inputs[place++];
      if (input.usage == TAMP_USE_READ && input.known == 0 && condition(input)) set_numbers(input, count_numbers(t));
    });
  }
}

}  // namespace

bool is_finite(const tamp_recorded_tensor &t) {
  return t.known == 0 || t.positive_infinite + t.negative_infinite + t.nan == 0;
}

void describe_inputs(tamp_recording &recording, RecordedEvent &event, const Running &running,
                     const at::RecordFunction &fn) {
  const auto *schema = running.op && running.op->hasSchema() ? &running.op->schema() : nullptr;
  const auto arguments = fn.inputs();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const uint8_t use = use_of_input(schema, i);
    for_each_tensor(arguments[i], [&](const Tensor &t) {
      auto input = describe(recording, t, use);
      // What the operator overwrites can only be counted now, and the rest is, if its results are not finite.
      if (use == TAMP_USE_WRITE && !recording.timed) set_numbers(input, count_numbers(t));
      event.inputs.push_back(input);
    });
  }
  if (recording.timed) return;
  // What it reads in the memory that it overwrites, such as both factors of `x *= x`, can only be counted now as well.
  count_read(running.arguments, event.inputs, [&](const tamp_recorded_tensor &input) {
    const auto overwrites = [&](const tamp_recorded_tensor &t) { return writes(t) && t.memory == input.memory; };
    return input.memory >= 0 && std::any_of(event.inputs.begin(), event.inputs.end(), overwrites);
  });
}

void keep_arguments(Running &running, const at::RecordFunction &fn) {
  running.arguments.assign(fn.inputs().begin(), fn.inputs().end());
  for (const IValue &argument : running.arguments) {
    for_each_tensor(argument, [&](const Tensor &t) {
      if (t.requires_grad() && t.grad_fn() != nullptr) running.nodes.push_back(t.grad_fn());
    });
  }
}

void count_inputs(std::vector<tamp_recorded_tensor> &inputs, const Running &running) {
  count_read(running.arguments, inputs, [](const tamp_recorded_tensor &) { return true; });
}

Results describe_results(tamp_recording &recording, const at::RecordFunction &fn, const Running &running,
                         const std::vector<tamp_recorded_tensor> &inputs) {
  Results results;
  std::unordered_map<int64_t, uint8_t> uses;
  for (const auto &t : inputs) uses[t.memory] = std::max(uses[t.memory], t.usage);
  const bool counts = !recording.timed && !is_uninitialized(fn.name());
  bool passed_on = false;
  if (counts) {
    const std::lock_guard<std::mutex> lock(recording.mutex);
    passed_on = only_runs_others(recording, running);
  }
  const auto add = [&](const Tensor &t) {
    auto out = describe(recording, t, TAMP_USE_WRITE);
    const auto use = uses.find(out.memory);
    if (use != uses.end() && use->second == TAMP_USE_READ) out.usage = TAMP_USE_VIEW;
    if (counts && out.usage == TAMP_USE_WRITE) set_numbers(out, numbers_of_result(recording, t, passed_on));
    if (out.known != 0 && t.layout() == at::kStrided) results.computed.push_back(t);
    results.described.push_back(out);
  };
  for (const IValue &value : fn.outputs()) {
    for_each_tensor(value, [&](const Tensor &t) {
      if (results.node == nullptr) results.node = node_made(t, running);
      add(t);
    });
  }
  // What an operator writes to without returning it.
  size_t place = 0;
  for (const IValue &argument : running.arguments) {
    for_each_tensor(argument, [&](const Tensor &t) {
      const auto &input = inputs[place++];
      const auto same = [&](const tamp_recorded_tensor &out) { return out.memory == input.memory; };
      if (writes(input) && std::none_of(results.described.begin(), results.described.end(), same)) add(t);
    });
  }
  return results;
}

}  // namespace tamp
