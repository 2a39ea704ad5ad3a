// Recordings of operators and backward nodes.

// record_function.h declares fields of its own in a debug build, which libtorch's binaries do not have.
#ifndef NDEBUG
#define NDEBUG
#endif

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <limits>
#include <optional>
#include <string_view>

#include "guarded.h"
#include "recording.h"

namespace {

using at::Tensor;
using c10::IValue;
using tamp::for_each_tensor;
using tamp::Numbers;
using tamp::RecordedEvent;
typedef std::vector<std::pair<Tensor, uint8_t>> Uses;

constexpr int64_t kMostRepeats = 32;
constexpr size_t kMostEvents = 2000000;

// libtorch calls back plain functions, so each running recording has a slot, and a function of its own that knows it.
constexpr size_t kSlots = 16;
std::mutex slots_mutex;
std::array<tamp_recording *, kSlots> slots{};

// What the recording's own work must not do: be recorded, be differentiated, or be cast.
struct Unnoticed {
  at::RecordFunctionGuard unrecorded{false};
  c10::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard uncast{c10::autocast_dispatch_keyset};
};

const c10::OperatorHandle *find(const at::RecordFunction &fn, std::optional<c10::OperatorHandle> &held) {
  const auto name = fn.operator_name();
  if (name) held = c10::Dispatcher::singleton().findSchema(*name);
  return held ? &*held : nullptr;
}

// Whether an operator that writes to this argument ignores its former numbers.
bool overwrites(const c10::FunctionSchema &schema, const c10::Argument &argument) {
  if (argument.is_out()) return true;
  static const std::unordered_set<std::string_view> filling = {
      "aten::copy_",      "aten::fill_",   "aten::zero_",      "aten::normal_",     "aten::uniform_",
      "aten::bernoulli_", "aten::random_", "aten::geometric_", "aten::log_normal_", "aten::exponential_",
      "aten::cauchy_",    "aten::eye_",    "aten::set_",       "aten::resize_"};
  return filling.count(schema.name()) != 0;
}

// Whether an operator has no kernel of its own.
bool is_composite(const c10::OperatorHandle &op) {
  using c10::DispatchKey;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
}

uint8_t use_of_input(const c10::FunctionSchema *schema, size_t index) {
  if (schema == nullptr || index >= schema->arguments().size()) return TAMP_USE_READ;
  const auto &argument = schema->arguments()[index];
  if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) return TAMP_USE_READ;
  return overwrites(*schema, argument) ? TAMP_USE_OVERWRITE : TAMP_USE_WRITE;
}

// Whether the numbers of an output are not there yet.
bool is_uninitialized(std::string_view name) {
  return name.substr(0, 11) == "aten::empty" || name.substr(0, 15) == "aten::new_empty" || name == "aten::resize_";
}

const c10::StorageImpl *storage(const Tensor &t) {
  return t.unsafeGetTensorImpl()->has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
}

// The number of the memory of `t`, which is new if it did not appear before. Under the lock.
const tamp_recording::Memory *memory_of(tamp_recording &recording, const Tensor &t, int64_t parameter) {
  const auto *impl = storage(t);
  if (impl == nullptr) return nullptr;
  const auto found = recording.memory.find(impl);
  if (found != recording.memory.end()) return &found->second;
  const c10::Storage &held = t.storage();
  auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(held.unsafeGetStorageImpl());
  tamp_recording::Memory entry{c10::weak_intrusive_ptr<c10::StorageImpl>(strong),
                               static_cast<int64_t>(recording.memory.size()), parameter};
  return &recording.memory.emplace(impl, std::move(entry)).first->second;
}

// The numbers of `t`. What an operator only reads is counted again only if its version has changed. What it returns is
// always counted: an operator that runs others writes to their results without a new version.
std::optional<Numbers> numbers_of(tamp_recording &recording, const Tensor &t, bool changed) {
  const auto *impl = t.unsafeGetTensorImpl();
  const bool versioned = !t.is_inference();
  const uint32_t version = versioned ? impl->version_counter().current_version() : 0;
  if (versioned && !changed) {
    const std::lock_guard<std::mutex> lock(recording.mutex);
    const auto found = recording.known.find(impl);
    if (found != recording.known.end() && found->second.version == version) return found->second.numbers;
  }
  const auto counted = tamp::count_numbers(t);
  if (versioned) {
    const std::lock_guard<std::mutex> lock(recording.mutex);
    tamp_recording::Known entry{c10::weak_intrusive_ptr<c10::TensorImpl>(t.getIntrusivePtr()), version, counted};
    recording.known.insert_or_assign(impl, std::move(entry));
  }
  return counted;
}

enum class Count { kNothing, kIfChanged, kAgain };

tamp_recorded_tensor describe(tamp_recording &recording, const Tensor &t, uint8_t use, Count count) {
  tamp_recorded_tensor out{};
  const bool uncounted = recording.timed || count == Count::kNothing;
  const auto counted = uncounted ? std::nullopt : numbers_of(recording, t, /*changed=*/count == Count::kAgain);
  tamp::describe_layout(out, t);
  const std::lock_guard<std::mutex> lock(recording.mutex);
  const auto *memory = memory_of(recording, t, -1);
  out.memory = memory == nullptr ? -1 : memory->number;
  out.parameter = memory == nullptr ? -1 : memory->parameter;
  out.elements = t.unsafeGetTensorImpl()->is_sparse() ? 0 : t.numel();
  out.usage = use;
  out.known = counted.has_value();
  if (counted) {
    out.positive_infinite = counted->positive_infinite;
    out.negative_infinite = counted->negative_infinite;
    out.nan = counted->nan;
    out.largest = counted->largest;
  }
  return out;
}

bool is_finite(const tamp_recorded_tensor &t) {
  return t.known == 0 || t.positive_infinite + t.negative_infinite + t.nan == 0;
}

// What is kept while an operator runs.
struct Running : at::ObserverContext {
  int64_t event = -1;
  std::optional<c10::OperatorHandle> op;
  std::vector<IValue> arguments;     // of operators only
  std::vector<c10::Device> devices;  // in a timed recording
};

std::unique_ptr<Running> begin(tamp_recording &recording, const at::RecordFunction &fn) {
  const bool is_operator = fn.scope() == at::RecordScope::FUNCTION;
  RecordedEvent event;
  event.raw.autocast = is_operator ? tamp::autocast_of(fn.inputs()) : -1;
  const Unnoticed unnoticed;
  auto running = std::make_unique<Running>();
  if (recording.timed) {
    if (is_operator) tamp::add_devices(running->devices, fn.inputs());
    tamp::synchronize(running->devices);
    event.raw.entered = tamp::now();
  }
  event.raw.kind = is_operator                                        ? TAMP_EVENT_OPERATOR
                   : fn.scope() == at::RecordScope::BACKWARD_FUNCTION ? TAMP_EVENT_NODE
                                                                      : TAMP_EVENT_NAME;
  if (is_operator) {
    const auto *op = find(fn, running->op);
    const auto *schema = op == nullptr || !op->hasSchema() ? nullptr : &op->schema();
    const auto arguments = fn.inputs();
    event.raw.flags = tamp::flags_of(arguments);
    event.raw.composite = op != nullptr && is_composite(*op);
    if (!recording.timed) running->arguments.assign(arguments.begin(), arguments.end());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const uint8_t use = use_of_input(schema, i);
      for_each_tensor(arguments[i], [&](const Tensor &t) {
        const auto count = use == TAMP_USE_OVERWRITE ? Count::kNothing : Count::kIfChanged;
        event.inputs.push_back(describe(recording, t, use, count));
      });
    }
  }
  event.raw.sequence = fn.seqNr();
  event.raw.thread = at::RecordFunction::currentThreadId();
  event.raw.forward_thread = fn.forwardThreadId();
  event.raw.ended = -1;
  const std::lock_guard<std::mutex> lock(recording.mutex);
  TORCH_CHECK(recording.events.size() < kMostEvents, "a recording of more than ", kMostEvents, " operators");
  event.raw.name = recording.names.insert(fn.name()).first->c_str();
  auto &open = recording.open[event.raw.thread];
  event.raw.parent = open.empty() ? -1 : open.back();
  running->event = static_cast<int64_t>(recording.events.size());
  open.push_back(running->event);
  auto &stored = recording.events.emplace_back(std::move(event));
  if (recording.timed) stored.raw.started = tamp::now();
  return running;
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

// Whether finite half-precision numbers became non-finite ones.
bool overflowed(const RecordedEvent &event) {
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

void end(tamp_recording &recording, const at::RecordFunction &fn, Running &running) {
  const Unnoticed unnoticed;
  RecordedEvent event;
  if (recording.timed) {
    const auto &results = fn.outputs();
    tamp::add_devices(running.devices, c10::ArrayRef<const IValue>(results.data(), results.size()));
    tamp::synchronize(running.devices);
    event.raw.ended_at = tamp::now();
  }
  {
    const std::lock_guard<std::mutex> lock(recording.mutex);
    event.inputs = recording.events[running.event].inputs;
  }
  if (fn.scope() == at::RecordScope::FUNCTION) {
    std::unordered_map<int64_t, uint8_t> inputs;
    for (const auto &t : event.inputs) inputs[t.memory] = std::max(inputs[t.memory], t.usage);
    const auto count = is_uninitialized(fn.name()) ? Count::kNothing : Count::kAgain;
    for (const IValue &value : fn.outputs()) {
      for_each_tensor(value, [&](const Tensor &t) {
        auto out = describe(recording, t, TAMP_USE_WRITE, count);
        const auto input = inputs.find(out.memory);
        if (input != inputs.end() && input->second == TAMP_USE_READ) out.usage = TAMP_USE_VIEW;
        event.outputs.push_back(out);
      });
    }
  }
  std::optional<double> repeated;
  if (running.op && !recording.timed && recording.repeats < kMostRepeats && overflowed(event)) {
    try {
      repeated = repeat(running);
    } catch (const std::exception &) {
      // Not every operator has f32 kernels.
    }
  }
  const std::lock_guard<std::mutex> lock(recording.mutex);
  auto &stored = recording.events[running.event];
  recording.repeats += repeated.has_value();
  stored.raw.repeated = repeated.has_value();
  stored.raw.repeated_largest = repeated.value_or(0);
  stored.outputs = std::move(event.outputs);
  stored.raw.ended = recording.ended++;
  auto &open = recording.open[stored.raw.thread];
  if (!open.empty() && open.back() == running.event) open.pop_back();
  stored.raw.ended_at = event.raw.ended_at;
  if (recording.timed) stored.raw.left = tamp::now();
}

// libtorch only warns of exceptions of callbacks.
template <typename F>
void noting_failure(tamp_recording &recording, F &&f) noexcept {
  std::string failure;
  try {
    return f();
  } catch (const c10::Error &e) {
    failure = e.what_without_backtrace();
  } catch (const std::exception &e) {
    failure = e.what();
  }
  const std::lock_guard<std::mutex> lock(recording.mutex);
  if (recording.failure.empty()) recording.failure = failure;
}

template <size_t Slot>
std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction &fn) {
  std::unique_ptr<at::ObserverContext> running;
  noting_failure(*slots[Slot], [&] { running = begin(*slots[Slot], fn); });
  return running;
}

template <size_t Slot>
void on_end(const at::RecordFunction &fn, at::ObserverContext *context) {
  if (context == nullptr) return;
  noting_failure(*slots[Slot], [&] { end(*slots[Slot], fn, static_cast<Running &>(*context)); });
}

template <size_t... Slot>
at::RecordFunctionCallback callback(size_t slot, std::index_sequence<Slot...>) {
  static constexpr at::RecordFunctionCallback::StartCallback starts[] = {on_start<Slot>...};
  static constexpr at::RecordFunctionCallback::EndCallback ends[] = {on_end<Slot>...};
  return at::RecordFunctionCallback(starts[slot], ends[slot])
      .needsInputs(true)
      .needsOutputs(true)
      .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
}

void stop(tamp_recording &recording) {
  if (!recording.running) return;
  recording.running = false;
  at::removeCallback(recording.handle);
  const std::lock_guard<std::mutex> lock(slots_mutex);
  slots[recording.slot] = nullptr;
}

tamp_recording *start(bool timed, tamp_tensor *const *parameters, size_t count, char **err) {
  return tamp::guarded(err, [&]() -> tamp_recording * {
    auto recording = std::make_unique<tamp_recording>();
    recording->timed = timed;
    for (size_t i = 0; i < count; ++i) memory_of(*recording, tamp::tensor(parameters[i]), static_cast<int64_t>(i));
    {
      const std::lock_guard<std::mutex> lock(slots_mutex);
      while (recording->slot < kSlots && slots[recording->slot] != nullptr) ++recording->slot;
      TORCH_CHECK(recording->slot < kSlots, kSlots, " recordings are running in this process already");
      slots[recording->slot] = recording.get();
    }
    recording->handle = at::addThreadLocalCallback(callback(recording->slot, std::make_index_sequence<kSlots>()));
    recording->running = true;
    return recording.release();
  });
}

}  // namespace

extern "C" {

tamp_recording *tamp_recording_start(tamp_tensor *const *parameters, size_t count, char **err) noexcept {
  return start(/*timed=*/false, parameters, count, err);
}

tamp_recording *tamp_recording_start_timed(tamp_tensor *const *parameters, size_t count, char **err) noexcept {
  return start(/*timed=*/true, parameters, count, err);
}

void tamp_recording_stop(tamp_recording *recording, char **err) noexcept {
  tamp::guarded(err, [&] {
    stop(*recording);
    TORCH_CHECK(recording->failure.empty(), "a recording failed: ", recording->failure);
  });
}

size_t tamp_recording_count(const tamp_recording *recording) noexcept { return recording->events.size(); }

void tamp_recording_event(const tamp_recording *recording, size_t index, tamp_recorded_event *out,
                          char **err) noexcept {
  tamp::guarded(err, [&] {
    const auto &event = recording->events.at(index);
    *out = event.raw;
    out->inputs = event.inputs.data();
    out->input_count = event.inputs.size();
    out->outputs = event.outputs.data();
    out->output_count = event.outputs.size();
  });
}

int64_t tamp_recording_memory(const tamp_recording *recording, const tamp_tensor *t, char **err) noexcept {
  return tamp::guarded(err, [&]() -> int64_t {
    const auto found = recording->memory.find(storage(tamp::tensor(t)));
    return found == recording->memory.end() ? -1 : found->second.number;
  });
}

void tamp_recording_free(tamp_recording *recording) noexcept {
  if (recording == nullptr) return;
  stop(*recording);
  delete recording;
}

tamp_name *tamp_name_begin(const char *name, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_name * {
    auto scope = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (scope->isActive()) scope->before(std::string_view(name));
    return reinterpret_cast<tamp_name *>(scope.release());
  });
}

void tamp_name_end(tamp_name *name) noexcept { delete reinterpret_cast<at::RecordFunction *>(name); }

}  // extern "C"
