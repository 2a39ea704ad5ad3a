// Recordings of operators and backward nodes.

// Before all others, so that record_function.h is included as in a release build, like that of libtorch.
#include "insight/recorder.h"

#include <array>

#include "border/guarded.h"

namespace {

// libtorch calls back plain functions, so each running recording has a slot, and a function of its own that knows it.
constexpr size_t kSlots = 16;
std::mutex slots_mutex;
std::array<std::shared_ptr<tamp_recording>, kSlots> slots;
size_t next_slot = 0;

std::shared_ptr<tamp_recording> in_slot(size_t slot) {
  const std::lock_guard<std::mutex> lock(slots_mutex);
  return slots[slot];
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
  } catch (...) {
    failure = "unknown C++ exception";
  }
  const std::lock_guard<std::mutex> lock(recording.mutex);
  if (recording.failure.empty()) recording.failure = failure;
}

template <size_t Slot>
std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction &fn) {
  // After a backward pass that failed, the threads of other devices may go on for a while.
  const auto recording = in_slot(Slot);
  if (recording == nullptr) return nullptr;
  std::unique_ptr<tamp::Running> running;
  noting_failure(*recording, [&] { running = tamp::begin(*recording, fn); });
  if (running != nullptr) running->recording = recording;
  return running;
}

void on_end(const at::RecordFunction &fn, at::ObserverContext *context) {
  if (context == nullptr) return;
  auto &running = static_cast<tamp::Running &>(*context);
  noting_failure(*running.recording, [&] { tamp::end(*running.recording, fn, running); });
}

template <size_t... Slot>
at::RecordFunctionCallback callback(size_t slot, std::index_sequence<Slot...>) {
  static constexpr at::RecordFunctionCallback::StartCallback starts[] = {on_start<Slot>...};
  return at::RecordFunctionCallback(starts[slot], on_end)
      .needsInputs(true)
      .needsOutputs(true)
      .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
}

void stop(tamp_recording &recording) {
  if (!recording.running) return;
  recording.running = false;
  at::removeCallback(recording.handle);
  {
    const std::lock_guard<std::mutex> lock(recording.mutex);
    recording.stopped = true;
  }
  const std::lock_guard<std::mutex> lock(slots_mutex);
  slots[recording.slot].reset();
}

}  // namespace

void tamp::note_function(std::string_view name, uint64_t thread, uint64_t sequence) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  at::RecordFunction event(std::move(*callbacks));
  event.setForwardThreadId(thread);
  event.before(name, static_cast<int64_t>(sequence));
}

extern "C" {

tamp_recording *tamp_recording_start(tamp_tensor *const *parameters, size_t count, uint8_t how,
                                     const tamp_reference *reference, int8_t dtype, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_recording * {
    const auto recording = std::make_shared<tamp_recording>();
    recording->timed = how == TAMP_RECORD_TIMES;
    if (reference != nullptr) {
      recording->comparison.emplace();
      recording->comparison->reference = reference->reference;
      recording->comparison->how = how;
      recording->comparison->dtype = static_cast<at::ScalarType>(dtype);
    }
    for (size_t i = 0; i < count; ++i) tamp::add_parameter(*recording, tamp::tensor(parameters[i]), i);
    {
      const std::lock_guard<std::mutex> lock(slots_mutex);
      // In turn, so that what is left of one recording is not taken for a part of the next.
      size_t tried = 0;
      while (tried < kSlots && slots[(next_slot + tried) % kSlots] != nullptr) ++tried;
      TORCH_CHECK(tried < kSlots, kSlots, " recordings are running in this process already");
      recording->slot = (next_slot + tried) % kSlots;
      slots[recording->slot] = recording;
      next_slot = recording->slot + 1;
    }
    try {
      recording->handle = at::addThreadLocalCallback(callback(recording->slot, std::make_index_sequence<kSlots>()));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(slots_mutex);
      slots[recording->slot].reset();
      throw;
    }
    recording->running = true;
    recording->itself = recording;
    return recording.get();
  });
}

uint8_t tamp_recording_differs(const tamp_recording *recording) noexcept {
  const auto &comparison = recording->comparison;
  if (!comparison || comparison->how == TAMP_RECORD_REFERENCE) return 0;
  return comparison->differs || comparison->place != comparison->reference->results.size();
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
    const auto found = recording->memory.find(tamp::storage(tamp::dense_part(tamp::tensor(t))));
    return found == recording->memory.end() ? -1 : found->second.number;
  });
}

void tamp_recording_free(tamp_recording *recording) noexcept {
  if (recording == nullptr) return;
  stop(*recording);
  const auto last = std::move(recording->itself);
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
