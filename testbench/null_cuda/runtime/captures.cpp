#include "captures.h"

#include <algorithm>
#include <utility>

#include "record.h"
#include "streams.h"

namespace null_cuda {
namespace {

std::set<std::shared_ptr<Capture>> &captures() {
  static auto *const all = new std::set<std::shared_ptr<Capture>>;
  return *all;
}

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

bool is_on(const Capture &capture, int device, bool only_blocking) {
  return std::any_of(capture.streams.begin(), capture.streams.end(), [&](const Stream *stream) {
    return stream->device == device && (!only_blocking || stream->is_blocking());
  });
}

// Whether the capture forbids unsafe calls to the calling thread.
bool forbids(const Capture &capture) {
  const bool is_mine = capture.thread == thread_id();
  switch (mode_of_thread) {
    case cudaStreamCaptureModeGlobal:
      return capture.mode == cudaStreamCaptureModeGlobal || (is_mine && capture.mode != cudaStreamCaptureModeRelaxed);
    case cudaStreamCaptureModeThreadLocal:
      return is_mine && capture.mode != cudaStreamCaptureModeRelaxed;
    default:
      return false;
  }
}

// These nodes and everything that they depend on.
std::set<Node *> with_ancestors(const std::set<Node *> &nodes) {
  std::set<Node *> seen;
  std::vector<Node *> todo(nodes.begin(), nodes.end());
  while (!todo.empty()) {
    Node *node = todo.back();
    todo.pop_back();
    if (seen.insert(node).second) todo.insert(todo.end(), node->dependencies.begin(), node->dependencies.end());
  }
  return seen;
}

// Whether the work of all streams was joined to the one with which the capture began.
bool is_joined(const Capture &capture) {
  const std::set<Node *> joined = with_ancestors(capture.origin->tail);
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](const Stream *stream) {
    return std::includes(joined.begin(), joined.end(), stream->tail.begin(), stream->tail.end());
  });
}

cudaError_t begin(cudaStream_t handle, cudaStreamCaptureMode mode, Graph *graph, std::set<Node *> tail) {
  const Guard guard(lock());
  Stream *stream = stream_of(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaStreamBeginCapture");
  if (stream->is_default()) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  if (stream->capture != nullptr) return fail(cudaErrorIllegalState, "cudaStreamBeginCapture");
  stream->capture = std::make_shared<Capture>(Capture{next_id(), mode, stream, thread_id(), graph, true, {stream}});
  stream->tail = std::move(tail);
  captures().insert(stream->capture);
  note("capture/begin", stream->device);
  return cudaSuccess;
}

// Why a capture cannot be ended on this stream.
cudaError_t check_end(const Capture &capture, const Stream *stream) {
  if (capture.origin != stream) return cudaErrorStreamCaptureUnmatched;
  const bool any_thread = capture.mode == cudaStreamCaptureModeRelaxed || capture.thread == thread_id();
  return any_thread ? cudaSuccess : cudaErrorStreamCaptureWrongThread;
}

std::set<Node *> nodes_of(const cudaGraphNode_t *handles, size_t count) {
  std::set<Node *> out;
  for (size_t i = 0; i < count; ++i) out.insert(reinterpret_cast<Node *>(handles[i]));
  return out;
}

}  // namespace

uint64_t next_id() {
  static uint64_t last = 0;
  return ++last;
}

bool captures_on(int device, bool only_blocking) {
  return std::any_of(captures().begin(), captures().end(),
                     [&](const auto &capture) { return is_on(*capture, device, only_blocking); });
}

void invalidate(Capture &capture, const std::string &function) {
  if (!std::exchange(capture.is_valid, false)) return;
  note("capture/broken by " + function, capture.origin->device);
}

void invalidate_on(int device, const std::string &function) {
  for (const auto &capture : captures()) {
    if (is_on(*capture, device, /*only_blocking=*/false)) invalidate(*capture, function);
  }
}

cudaError_t check_unsafe(const char *function) {
  const Guard guard(lock());
  bool is_forbidden = false;
  for (const auto &capture : captures()) {
    if (!forbids(*capture)) continue;
    is_forbidden = true;
    invalidate(*capture, function);
  }
  return is_forbidden ? fail(cudaErrorStreamCaptureUnsupported, function) : cudaSuccess;
}

}  // namespace null_cuda

using namespace null_cuda;

NULL_CUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const Guard guard(lock());
  return begin(stream, mode, make_graph(), {});
}

NULL_CUDA_API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                                        const cudaGraphNode_t *dependencies, const cudaGraphEdgeData *,
                                                        size_t count, cudaStreamCaptureMode mode) {
  return begin(stream, mode, reinterpret_cast<Graph *>(graph), nodes_of(dependencies, count));
}

NULL_CUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *out) {
  const Guard guard(lock());
  *out = nullptr;
  Stream *stream = stream_of(handle);
  if (stream == nullptr || stream->capture == nullptr) return fail(cudaErrorIllegalState, "cudaStreamEndCapture");
  const auto capture = stream->capture;
  if (const cudaError_t error = check_end(*capture, stream)) {
    invalidate(*capture, "cudaStreamEndCapture");
    return fail(error, "cudaStreamEndCapture");
  }
  const bool joined = is_joined(*capture);
  for (Stream *each : capture->streams) {
    each->capture = nullptr;
    each->tail.clear();
  }
  captures().erase(capture);
  if (!capture->is_valid) return fail(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  if (!joined) return fail(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  note("capture/end", stream->device);
  *out = reinterpret_cast<cudaGraph_t>(capture->graph);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *out) {
  const Guard guard(lock());
  const Stream *stream = stream_of(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaStreamIsCapturing");
  if (stream->is_default() && captures_on(stream->device, /*only_blocking=*/true)) {
    return fail(cudaErrorStreamCaptureImplicit, "cudaStreamIsCapturing");
  }
  *out = cudaStreamCaptureStatusNone;
  if (stream->capture != nullptr) {
    *out = stream->capture->is_valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
  }
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status,
                                                   unsigned long long *id, cudaGraph_t *graph,
                                                   const cudaGraphNode_t **dependencies,
                                                   const cudaGraphEdgeData **edges, size_t *count) {
  const Guard guard(lock());
  static thread_local std::vector<cudaGraphNode_t> list;
  if (const cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
  const Stream *stream = stream_of(handle);
  const bool is_active = *status == cudaStreamCaptureStatusActive;
  list.clear();
  if (is_active) {
    for (Node *node : stream->tail) list.push_back(reinterpret_cast<cudaGraphNode_t>(node));
  }
  if (id != nullptr) *id = is_active ? stream->capture->id : 0;
  if (graph != nullptr && is_active) *graph = reinterpret_cast<cudaGraph_t>(stream->capture->graph);
  if (dependencies != nullptr) *dependencies = list.data();
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = list.size();
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t *dependencies,
                                                              const cudaGraphEdgeData *, size_t count, unsigned flags) {
  const Guard guard(lock());
  Stream *stream = stream_of(handle);
  if (stream == nullptr || stream->capture == nullptr) {
    return fail(cudaErrorIllegalState, "cudaStreamUpdateCaptureDependencies");
  }
  if (flags == cudaStreamSetCaptureDependencies) stream->tail.clear();
  stream->tail.merge(nodes_of(dependencies, count));
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}
