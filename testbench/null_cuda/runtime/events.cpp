#include "events.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>

#include "captures.h"
#include "devices.h"
#include "pinned.h"
#include "record.h"
#include "settings.h"
#include "streams.h"

namespace null_cuda {
namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  int device;
  unsigned flags;
  bool is_recorded = false;
  int64_t lag = 0;                 // how many questions it still answers with no
  const Stream *stream = nullptr;  // on which it was recorded; only compared
  uint64_t sent = 0;               // how many late copies had been sent when it was recorded
  uint64_t last_copy = 0;          // see Stream
  Clock::time_point time = {};
  bool is_captured = false;  // recorded in a capture
  std::weak_ptr<Capture> capture = {};
  std::set<Node *> tail = {};
};

std::set<Event *> &events() {
  static auto *const all = new std::set<Event *>;
  return *all;
}

Event *event_of(cudaEvent_t handle) {
  auto *event = reinterpret_cast<Event *>(handle);
  return events().count(event) != 0 ? event : nullptr;
}

// Asking or awaiting an event that was recorded in a capture breaks the capture.
cudaError_t check_event(Event *event, const char *function) {
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle, function);
  if (!event->is_captured) return check_unsafe(function);
  if (const auto capture = event->capture.lock()) invalidate(*capture, function);
  return fail(cudaErrorCapturedEvent, function);
}

// A stream that waits for a captured event takes part in the capture.
cudaError_t join(Stream &stream, const std::shared_ptr<Capture> &capture, const Event &event) {
  if (stream.capture == nullptr) {
    if (stream.is_default()) {
      invalidate(*capture, "cudaStreamWaitEvent");
      return fail(cudaErrorStreamCaptureImplicit, "cudaStreamWaitEvent");
    }
    stream.capture = capture;
    stream.tail.clear();
    capture->streams.insert(&stream);
  } else if (stream.capture != capture) {
    invalidate(*capture, "cudaStreamWaitEvent");
    invalidate(*stream.capture, "cudaStreamWaitEvent");
    return fail(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
  }
  stream.tail.insert(event.tail.begin(), event.tail.end());
  return cudaSuccess;
}

}  // namespace

void let_happen(int device, const Stream *stream) {
  for (Event *event : events()) {
    if (event->device == device && (stream == nullptr || event->stream == stream)) event->lag = 0;
  }
}

}  // namespace null_cuda

using namespace null_cuda;

NULL_CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  const Guard guard(lock());
  auto *event = new Event{current_device(), flags};
  events().insert(event);
  *out = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, cudaEventDefault); }

NULL_CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Guard guard(lock());
  auto *event = reinterpret_cast<Event *>(handle);
  if (events().erase(event) == 0) return fail(cudaErrorInvalidResourceHandle, "cudaEventDestroy");
  delete event;
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  const Guard guard(lock());
  Event *event = event_of(handle);
  Stream *stream = stream_of(stream_handle);
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaEventRecord");
  if (const cudaError_t error = check_work(stream, "cudaEventRecord")) return error;
  if (event->device != stream->device) return fail(cudaErrorInvalidResourceHandle, "cudaEventRecord");
  event->is_recorded = true;
  event->lag = simulated::lag();
  event->stream = stream;
  event->sent = sent();
  event->last_copy = stream->last_copy;
  event->time = Clock::now();
  event->capture = stream->capture;
  event->tail = stream->tail;
  // An external event is a node of the graph, which every replay records.
  const bool is_node = stream->capture != nullptr && (flags & cudaEventRecordExternal) != 0;
  event->is_captured = stream->capture != nullptr && !is_node;
  if (is_node) stream->tail = {add_node(*stream->capture->graph, "event", stream->tail, nullptr)};
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

NULL_CUDA_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Guard guard(lock());
  Event *event = event_of(handle);
  if (const cudaError_t error = check_event(event, "cudaEventQuery")) return error;
  note("query/event", event->device);
  if (event->lag > 0) {
    --event->lag;
    return fail(cudaErrorNotReady, "cudaEventQuery");
  }
  arrive(event->sent);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Guard guard(lock());
  Event *event = event_of(handle);
  if (const cudaError_t error = check_event(event, "cudaEventSynchronize")) return error;
  event->lag = 0;
  arrive(event->sent);
  note("wait/event", event->device);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  const Guard guard(lock());
  Event *start = event_of(start_handle), *end = event_of(end_handle);
  for (Event *event : {start, end}) {
    if (const cudaError_t error = check_event(event, "cudaEventElapsedTime")) return error;
    if (!event->is_recorded || (event->flags & cudaEventDisableTiming) != 0) {
      return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
    }
  }
  if (end->lag > 0) return fail(cudaErrorNotReady, "cudaEventElapsedTime");
  *ms = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  const Guard guard(lock());
  Stream *stream = stream_of(handle);
  const Event *event = event_of(event_handle);
  if (stream == nullptr || event == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaStreamWaitEvent");
  const auto capture = event->capture.lock();
  if (event->is_captured && capture) return join(*stream, capture, *event);
  if (stream->capture != nullptr && event->is_recorded) {
    invalidate(*stream->capture, "cudaStreamWaitEvent");
    return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  stream->last_copy = std::max(stream->last_copy, event->last_copy);
  return cudaSuccess;
}
