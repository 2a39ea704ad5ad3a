// Copies within and between devices and the host, and memsets.

#include <cstring>
#include <string>

#include "../null_cuda.h"
#include "captures.h"
#include "devices.h"
#include "memory.h"
#include "pinned.h"
#include "record.h"
#include "settings.h"
#include "streams.h"

namespace null_cuda {
namespace {

thread_local bool reads_zeros = false;

// One copy, or the rows of one: `count` pieces of `size` bytes, so many bytes apart.
struct Shape {
  size_t size, count, to_pitch, from_pitch;
  size_t to_extent() const { return to_pitch * (count - 1) + size; }
  size_t from_extent() const { return from_pitch * (count - 1) + size; }
};

bool is_device(const Place &place) { return place.kind == Place::Kind::kDevice; }

const char *host_memory(const Place &place) { return place.kind == Place::Kind::kPinned ? "pinned" : "pageable"; }

// Between and within devices a copy is a launch, as it is for CUPTI.
std::string kind_of(const Place &to, const Place &from) {
  if (is_device(to) && is_device(from)) return to.device == from.device ? "launch/copy" : "launch/copy between devices";
  if (is_device(from)) return std::string("copy/to host, ") + host_memory(to);
  if (is_device(to)) return std::string("copy/from host, ") + host_memory(from);
  return "copy/within the host";
}

bool is_declared(cudaMemcpyKind kind, const Place &to, const Place &from) {
  if (kind == cudaMemcpyDefault) return true;
  const bool declares_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const bool declares_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  return declares_from == is_device(from) && declares_to == is_device(to);
}

enum class Numbers { kAtOnce, kLate, kZeros };

// On a stream, or in the order of a graph (null).
void move(char *to, const char *from, const Shape &shape, Numbers numbers, Stream *stream) {
  arrive_for(from, shape.from_extent(), stream == nullptr ? sent() : stream->last_copy);
  for (size_t i = 0; i < shape.count; ++i, to += shape.to_pitch, from += shape.from_pitch) {
    if (numbers == Numbers::kZeros) {
      memset(to, 0, shape.size);
    } else if (numbers == Numbers::kLate) {
      const uint64_t number = send(to, from, shape.size);
      if (stream != nullptr) stream->last_copy = number;
    } else {
      memmove(to, from, shape.size);
    }
  }
}

cudaError_t copy(void *to, const void *from, const Shape &shape, cudaMemcpyKind kind, cudaStream_t stream,
                 const char *function) {
  const Guard guard(lock());
  if (shape.size == 0 || shape.count == 0) return cudaSuccess;
  const auto there = find(to, shape.to_extent()), here = find(from, shape.from_extent());
  if (!there || !here || !is_declared(kind, *there, *here)) return fail(cudaErrorInvalidValue, function);
  const bool to_host = is_device(*here) && !is_device(*there);
  const bool is_late = to_host && there->kind == Place::Kind::kPinned && simulated::lag() > 0;
  const Numbers numbers = to_host && reads_zeros ? Numbers::kZeros : is_late ? Numbers::kLate : Numbers::kAtOnce;
  Stream *const on = stream_of(stream);
  Stream *const known = on == nullptr || on->capture != nullptr ? nullptr : on;
  const auto run = [to = there->view, from = here->view, shape, numbers, known] {
    move(to, from, shape, numbers, known);
  };
  const std::string details = std::to_string(shape.size * shape.count) + " bytes";
  const cudaError_t error = enqueue(stream, kind_of(*there, *here), details, run, function);
  if (error == cudaSuccess && to_host && there->kind == Place::Kind::kPageable) wait_for_copy(stream, details);
  return error;
}

cudaError_t set(void *at, int value, size_t size, cudaStream_t stream, const char *function) {
  const Guard guard(lock());
  if (size == 0) return cudaSuccess;
  const auto place = find(at, size);
  if (!place) return fail(cudaErrorInvalidValue, function);
  const auto run = [view = place->view, value, size] { memset(view, value, size); };
  return enqueue(stream, "launch/memset", std::to_string(size) + " bytes", run, function);
}

}  // namespace
}  // namespace null_cuda

using namespace null_cuda;

NULL_CUDA_API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind,
                                          cudaStream_t stream) {
  return copy(to, from, {size, 1, size, size}, kind, stream, "cudaMemcpyAsync");
}

NULL_CUDA_API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
  return copy(to, from, {size, 1, size, size}, cudaMemcpyDefault, stream, "cudaMemcpyPeerAsync");
}

NULL_CUDA_API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                            size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, {width, height, to_pitch, from_pitch}, kind, stream, "cudaMemcpy2DAsync");
}

NULL_CUDA_API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
  const Guard guard(lock());
  if (const cudaError_t error = check_unsafe("cudaMemcpy")) return error;
  const cudaError_t error = copy(to, from, {size, 1, size, size}, kind, nullptr, "cudaMemcpy");
  if (error != cudaSuccess) return error;
  arrive_all();
  note("wait/copy", current_device());
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
  return set(at, value, size, stream, "cudaMemsetAsync");
}

NULL_CUDA_API cudaError_t cudaMemset(void *at, int value, size_t size) {
  if (const cudaError_t error = check_unsafe("cudaMemset")) return error;
  return set(at, value, size, nullptr, "cudaMemset");
}

NULL_CUDA_API void null_cuda_read_zeros(int32_t zeros) { reads_zeros = zeros != 0; }
