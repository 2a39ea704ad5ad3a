// Streams. Work is done when it is put on one, or becomes a node of a graph while the stream is capturing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>

namespace null_cuda {

struct Capture;
struct Node;

struct Stream {
  int device;
  unsigned flags;
  int priority;
  uint64_t id;                       // 0 for the default stream of a device
  std::shared_ptr<Capture> capture;  // null unless it is capturing
  std::set<Node *> tail;             // what the next captured node depends on
  bool has_waited;                   // since its last work: a copy to memory that is not pinned has
  uint64_t last_copy = 0;            // to pinned memory, after which its work is ordered

  bool is_default() const { return id == 0; }
  bool is_blocking() const { return (flags & cudaStreamNonBlocking) == 0; }
};

// The stream behind a handle; the default stream of the current device for null. Null if there is none.
Stream *stream_of(cudaStream_t handle);

// An error if the stream may not take work now, or if the host may not wait for it.
cudaError_t check_work(Stream *stream, const char *function);
cudaError_t check_wait(Stream *stream, const char *function);

// Counts and does work on a stream, or adds it to the graph that the stream captures.
cudaError_t enqueue(cudaStream_t handle, const std::string &kind, const std::string &details, std::function<void()> run,
                    const char *function);

// The host waits until a copy to memory that is not pinned is there, unless it is captured.
void wait_for_copy(cudaStream_t handle, const std::string &details);

}  // namespace null_cuda
