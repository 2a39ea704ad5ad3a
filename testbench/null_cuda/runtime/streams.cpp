#include "streams.h"

#include <algorithm>
#include <array>
#include <utility>

#include "../null_cuda.h"
#include "captures.h"
#include "devices.h"
#include "events.h"
#include "pinned.h"
#include "record.h"
#include "settings.h"

namespace null_cuda {
namespace {

std::set<Stream *> &streams() {
  static auto *const all = new std::set<Stream *>;
  return *all;
}

Stream *default_stream(int device) {
  static auto *const all = new std::array<Stream *, simulated::kMostDevices>{};
  Stream *&out = all->at(static_cast<size_t>(device));
  if (out == nullptr) out = new Stream{device, cudaStreamDefault, 0, 0, nullptr, {}, false};
  return out;
}

// The default stream waits for the blocking streams of its device, which it must not while one of them is capturing.
cudaError_t check_default_stream(const Stream &stream, const char *function) {
  if (!stream.is_default() || !captures_on(stream.device, /*only_blocking=*/true)) return cudaSuccess;
  invalidate_on(stream.device, function);
  return fail(cudaErrorStreamCaptureImplicit, function);
}

}  // namespace

Stream *stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    return default_stream(current_device());
  }
  auto *stream = reinterpret_cast<Stream *>(handle);
  return streams().count(stream) != 0 ? stream : nullptr;
}

cudaError_t check_work(Stream *stream, const char *function) {
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, function);
  if (stream->capture == nullptr) return check_default_stream(*stream, function);
  return stream->capture->is_valid ? cudaSuccess : fail(cudaErrorStreamCaptureInvalidated, function);
}

cudaError_t check_wait(Stream *stream, const char *function) {
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, function);
  if (stream->capture != nullptr) {
    invalidate(*stream->capture, function);
    return fail(cudaErrorStreamCaptureUnsupported, function);
  }
  if (const cudaError_t error = check_default_stream(*stream, function)) return error;
  return check_unsafe(function);
}

cudaError_t enqueue(cudaStream_t handle, const std::string &kind, const std::string &details, std::function<void()> run,
                    const char *function) {
  const Guard guard(lock());
  Stream *stream = stream_of(handle);
  if (const cudaError_t error = check_work(stream, function)) return error;
  stream->has_waited = false;
  if (stream->capture != nullptr) {
    note("captured/" + kind, stream->device, details);
    stream->tail = {add_node(*stream->capture->graph, kind, stream->tail, std::move(run))};
    return cudaSuccess;
  }
  note(kind, stream->device, details);
  if (run) run();
  return cudaSuccess;
}

void wait_for_copy(cudaStream_t handle, const std::string &details) {
  Stream *stream = stream_of(handle);
  if (stream->capture != nullptr) return;
  note("wait/copy", stream->device, details);
  arrive_all();
  stream->has_waited = true;
}

}  // namespace null_cuda

using namespace null_cuda;

NULL_CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  const Guard guard(lock());
  auto *stream = new Stream{current_device(), flags, std::clamp(priority, -5, 0), next_id(), nullptr, {}, false};
  streams().insert(stream);
  *out = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}

NULL_CUDA_API cudaError_t cudaStreamCreate(cudaStream_t *out) {
  return cudaStreamCreateWithPriority(out, cudaStreamDefault, 0);
}

NULL_CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Guard guard(lock());
  auto *stream = reinterpret_cast<Stream *>(handle);
  if (streams().erase(stream) == 0) return fail(cudaErrorInvalidResourceHandle, "cudaStreamDestroy");
  if (stream->capture != nullptr) {
    invalidate(*stream->capture, "cudaStreamDestroy");
    stream->capture->streams.erase(stream);
  }
  delete stream;
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *out) {
  const Guard guard(lock());
  const Stream *stream = stream_of(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaStreamGetPriority");
  *out = stream->priority;
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Guard guard(lock());
  Stream *stream = stream_of(handle);
  if (const cudaError_t error = check_wait(stream, "cudaStreamSynchronize")) return error;
  arrive_all();
  let_happen(stream->device, stream);
  // libtorch synchronizes after each copy that has made the host wait by itself: that is one wait.
  if (!std::exchange(stream->has_waited, false)) note("wait/stream", stream->device);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Guard guard(lock());
  Stream *stream = stream_of(handle);
  if (const cudaError_t error = check_wait(stream, "cudaStreamQuery")) return error;
  note("query/stream", stream->device);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaDeviceSynchronize() {
  const Guard guard(lock());
  const int device = current_device();
  if (captures_on(device, /*only_blocking=*/false)) {
    invalidate_on(device, "cudaDeviceSynchronize");
    return fail(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  }
  if (const cudaError_t error = check_unsafe("cudaDeviceSynchronize")) return error;
  arrive_all();
  let_happen(device, nullptr);
  note("wait/device", device);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  return enqueue(stream, "host function", "", [=] { function(data); }, "cudaLaunchHostFunc");
}

NULL_CUDA_API int32_t null_cuda_library_call(const char *name, void *stream, const char *details) {
  const std::string text = std::string(name) + " " + details;
  return enqueue(static_cast<cudaStream_t>(stream), "launch/library", text, nullptr, name);
}

NULL_CUDA_API void null_cuda_enqueue(void *handle, void (*run)(void *), void (*drop)(void *), void *data) {
  const Guard guard(lock());
  Stream *stream = stream_of(static_cast<cudaStream_t>(handle));
  if (stream == nullptr || stream->capture == nullptr) {
    run(data);
    drop(data);
    return;
  }
  const std::shared_ptr<void> kept(data, drop);
  stream->tail = {add_node(*stream->capture->graph, "", stream->tail, [=] { run(kept.get()); })};
}
