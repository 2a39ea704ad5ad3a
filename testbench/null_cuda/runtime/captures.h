// Captures of streams into graphs, by the rules of NVIDIA's documentation. No GPU has confirmed them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace null_cuda {

struct Stream;

struct Node {
  std::string kind;  // as it is counted; empty for a computation, which belongs to the node before
  std::set<Node *> dependencies;
  std::function<void()> run;
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
};

struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  Stream *origin;
  uint64_t thread;
  Graph *graph;
  bool is_valid;
  std::set<Stream *> streams;
};

// A number that no stream or capture has.
uint64_t next_id();

Graph *make_graph();
Node *add_node(Graph &graph, const std::string &kind, const std::set<Node *> &dependencies, std::function<void()> run);

// Whether a stream of the device is capturing; `only_blocking` leaves out streams that the default one does not wait
// for.
bool captures_on(int device, bool only_blocking);

// What a function does that no stream may meet while it is capturing: the capture can only be ended.
void invalidate(Capture &capture, const std::string &function);
void invalidate_on(int device, const std::string &function);

// An error if the calling thread may not call a function that is unsafe during captures.
cudaError_t check_unsafe(const char *function);

}  // namespace null_cuda
