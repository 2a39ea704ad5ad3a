// What a recording notes when an operator, a backward node or a name begins and ends.

#include "insight/recorder.h"

#include <algorithm>
#include <limits>

#include "autocast/sizes.h"

namespace tamp {
namespace {

using at::Tensor;
using c10::IValue;

constexpr int64_t kMostRepeats = 32;
// Of about 3 kB each, half of which are the copies of the caller.
constexpr size_t kMostEvents = 1000000;

const c10::OperatorHandle *find(const at::RecordFunction &fn, std::optional<c10::OperatorHandle> &held) {
  const auto name = fn.operator_name();
  if (name) held = c10::Dispatcher::singleton().findSchema(*name);
  return held ? &*held : nullptr;
}

// Runs an operator again in f32. Returns the largest absolute value of its results, which may not be finite.
std::optional<double> repeat(const Running &running) {
  const auto &schema = running.op->schema();
  if (schema.is_mutable() || running.op->hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;
  std::vector<IValue> stack;
  for (const IValue &value : running.arguments) {
    const bool half =
        value.isTensor() && value.toTensor().defined() && at::isReducedFloatingType(value.toTensor().scalar_type());
    stack.push_back(half ? IValue(value.toTensor().detach().to(at::kFloat)) : value);
  }
  running.op->callBoxed(&stack);
  std::optional<double> largest;
  for (const IValue &value : stack) {
    for_each_tensor(value, [&](const Tensor &t) {
      const auto counted = t.scalar_type() == at::kFloat ? tamp::count_numbers(t) : std::nullopt;
      if (!counted) return;
      const double found = counted->nan != 0   ? std::numeric_limits<double>::quiet_NaN()
                           : counted->finite() ? counted->largest
                                               : std::numeric_limits<double>::infinity();
      if (!largest || !(found <= *largest)) largest = found;
    });
  }
  return largest;
}

// The size by which rules tell the calls of an operator apart.
uint64_t size_of(const c10::OperatorHandle &op, c10::ArrayRef<const IValue> arguments) {
  const auto &schema = op.schema();
  if (arguments.size() != schema.arguments().size()) return 0;
  const c10::ArrayRef<IValue> values(arguments.data(), arguments.size());
  return tamp::size_of(measure_of(op.operator_name().name, schema), values);
}

// Whether finite half-precision numbers became non-finite ones.
bool overflowed(const RecordedEvent &event) {
  if (is_filling(event.raw.name)) return false;
  const auto half = [](const tamp_recorded_tensor &t) {
    return at::isReducedFloatingType(static_cast<at::ScalarType>(t.dtype));
  };
  bool any = false;
  for (const auto &t : event.inputs) {
    if (!is_finite(t)) return false;
    any |= half(t);
  }
  for (const auto &t : event.outputs) {
    if (any && half(t) && !is_finite(t)) return true;
  }
  return false;
}

// The operator or backward node in which an event ran, or null.
const RecordedEvent *ran_in(const tamp_recording &recording, int64_t event) {
  for (int64_t parent = recording.events[event].raw.parent; parent >= 0;) {
    const auto &outer = recording.events[parent];
    if (outer.raw.kind != TAMP_EVENT_NAME) return &outer;
    parent = outer.raw.parent;
  }
  return nullptr;
}

// Keeps or compares what an operator that the program called returned. The caller holds the lock.
void compare(tamp_recording &recording, const Running &running, const char *name, const Results &results) {
  auto &comparison = *recording.comparison;
  if (results.node != nullptr) {
    comparison.pending.emplace_back(results.node->thread_id(), static_cast<int64_t>(results.node->sequence_nr()));
  }
  const auto *outer = ran_in(recording, running.event);
  if (outer == nullptr) {
    const bool drawn = running.op && running.op->hasTag(at::Tag::nondeterministic_seeded);
    comparison.forward(name, results.computed, drawn, recording.events[running.event].raw);
  } else if (outer->raw.kind == TAMP_EVENT_NODE) {
    comparison.backward({outer->raw.forward_thread, outer->raw.sequence}, results.computed);
  }
}

// If the results of an operator overflowed, runs it again in f32, at most kMostRepeats times in a recording.
std::optional<double> repeat_if_overflowed(tamp_recording &recording, const RecordedEvent &event,
                                           const Running &running) {
  if (!running.op || recording.timed || !overflowed(event)) return std::nullopt;
  {
    const std::lock_guard<std::mutex> lock(recording.mutex);
    if (recording.repeats >= kMostRepeats) return std::nullopt;
    ++recording.repeats;
  }
  try {
    return repeat(running);
  } catch (const std::exception &) {
    // Not every operator has f32 kernels.
    return std::nullopt;
  }
}

// Whether a recording goes on: it is neither stopped nor has failed.
bool is_open(tamp_recording &recording) {
  const std::lock_guard<std::mutex> lock(recording.mutex);
  return !recording.stopped && recording.failure.empty();
}

}  // namespace

std::unique_ptr<Running> begin(tamp_recording &recording, const at::RecordFunction &fn) {
  if (!is_open(recording)) return nullptr;
  const bool is_operator = fn.scope() == at::RecordScope::FUNCTION;
  RecordedEvent event;
  event.raw.autocast = is_operator ? autocast_of(fn.inputs()) : -1;
  const Unnoticed unnoticed;
  auto running = std::make_unique<Running>();
  if (recording.timed) {
    if (is_operator) add_devices(running->devices, fn.inputs());
    synchronize(running->devices);
    event.raw.entered = now();
  }
  event.raw.kind = is_operator                                        ? TAMP_EVENT_OPERATOR
                   : fn.scope() == at::RecordScope::BACKWARD_FUNCTION ? TAMP_EVENT_NODE
                                                                      : TAMP_EVENT_NAME;
  event.raw.sequence = -1;
  if (is_operator) {
    const auto *op = find(fn, running->op);
    event.raw.flags = flags_of(fn.inputs());
    event.raw.composite = op != nullptr && is_composite(*op);
    event.raw.size = op != nullptr ? size_of(*op, fn.inputs()) : 0;
    keep_arguments(*running, fn);
    describe_inputs(recording, event, *running, fn);
  } else {
    event.raw.sequence = fn.seqNr();
    event.raw.forward_thread = fn.forwardThreadId();
  }
  event.raw.thread = at::RecordFunction::currentThreadId();
  event.raw.ended = -1;
  const std::lock_guard<std::mutex> lock(recording.mutex);
  if (recording.stopped) return nullptr;
  TORCH_CHECK(recording.events.size() < kMostEvents, "a recording of more than ", kMostEvents, " operators");
  event.raw.name = recording.names.insert(fn.name()).first->c_str();
  auto &open = recording.open[event.raw.thread];
  event.raw.parent = open.empty() ? -1 : open.back();
  running->event = static_cast<int64_t>(recording.events.size());
  open.push_back(running->event);
  auto &stored = recording.events.emplace_back(std::move(event));
  if (recording.timed) stored.raw.started = now();
  return running;
}

void end(tamp_recording &recording, const at::RecordFunction &fn, Running &running) {
  if (!is_open(recording)) return;
  const Unnoticed unnoticed;
  RecordedEvent event;
  if (recording.timed) {
    const auto &outputs = fn.outputs();
    add_devices(running.devices, c10::ArrayRef<const IValue>(outputs.data(), outputs.size()));
    synchronize(running.devices);
    event.raw.ended_at = now();
  }
  {
    const std::lock_guard<std::mutex> lock(recording.mutex);
    event.inputs = recording.events[running.event].inputs;
    event.raw.name = recording.events[running.event].raw.name;
  }
  Results results;
  if (fn.scope() == at::RecordScope::FUNCTION) {
    results = describe_results(recording, fn, running, event.inputs);
    event.outputs = results.described;
    const bool finite = std::all_of(event.outputs.begin(), event.outputs.end(), is_finite);
    if (!finite) count_inputs(event.inputs, running);
  }
  const auto repeated = repeat_if_overflowed(recording, event, running);
  const std::lock_guard<std::mutex> lock(recording.mutex);
  if (recording.stopped) return;
  if (recording.comparison && fn.scope() == at::RecordScope::FUNCTION) {
    compare(recording, running, event.raw.name, results);
  }
  auto &stored = recording.events[running.event];
  stored.raw.repeated = repeated.has_value();
  stored.raw.repeated_largest = repeated.value_or(0);
  stored.inputs = std::move(event.inputs);
  stored.outputs = std::move(event.outputs);
  if (results.node != nullptr) {
    stored.raw.sequence = static_cast<int64_t>(results.node->sequence_nr());
    stored.raw.forward_thread = results.node->thread_id();
  }
  stored.raw.ended = recording.ended++;
  auto &open = recording.open[stored.raw.thread];
  if (!open.empty() && open.back() == running.event) open.pop_back();
  stored.raw.ended_at = event.raw.ended_at;
  if (recording.timed) stored.raw.left = now();
}

}  // namespace tamp
