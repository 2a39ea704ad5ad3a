// Graphs: what captures have recorded. A replay repeats the copies and the computations in the order of the capture.

#include <set>
#include <string>
#include <utility>

#include "captures.h"
#include "devices.h"
#include "record.h"
#include "streams.h"

namespace null_cuda {
namespace {

std::set<Graph *> &graphs() {
  static auto *const all = new std::set<Graph *>;
  return *all;
}

Graph *graph_of(cudaGraph_t handle) {
  auto *graph = reinterpret_cast<Graph *>(handle);
  return graphs().count(graph) != 0 ? graph : nullptr;
}

void replay(const Graph &graph) {
  for (const auto &node : graph.nodes) {
    if (!node->kind.empty()) note("replayed/" + node->kind, current_device());
    if (node->run) node->run();
  }
}

}  // namespace

Graph *make_graph() {
  auto *graph = new Graph;
  graphs().insert(graph);
  return graph;
}

Node *add_node(Graph &graph, const std::string &kind, const std::set<Node *> &dependencies, std::function<void()> run) {
  graph.nodes.push_back(std::make_unique<Node>(Node{kind, dependencies, std::move(run)}));
  return graph.nodes.back().get();
}

}  // namespace null_cuda

using namespace null_cuda;

// An executable graph is a copy, which outlives the graph.
NULL_CUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t handle, unsigned long long) {
  const Guard guard(lock());
  const Graph *graph = graph_of(handle);
  if (graph == nullptr) return fail(cudaErrorInvalidValue, "cudaGraphInstantiate");
  auto *copy = new Graph;
  for (const auto &node : graph->nodes) add_node(*copy, node->kind, {}, node->run);
  note("graph/instantiate", current_device());
  *out = reinterpret_cast<cudaGraphExec_t>(copy);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  const auto *graph = reinterpret_cast<Graph *>(handle);
  return enqueue(
      stream, "graph/launch", std::to_string(graph->nodes.size()) + " nodes", [=] { replay(*graph); },
      "cudaGraphLaunch");
}

NULL_CUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  const Guard guard(lock());
  delete reinterpret_cast<Graph *>(handle);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  const Guard guard(lock());
  Graph *graph = graph_of(handle);
  if (graph == nullptr) return fail(cudaErrorInvalidValue, "cudaGraphDestroy");
  graphs().erase(graph);
  delete graph;
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t *nodes, size_t *count) {
  const Guard guard(lock());
  const Graph *graph = graph_of(handle);
  if (graph == nullptr) return fail(cudaErrorInvalidValue, "cudaGraphGetNodes");
  if (nodes != nullptr) {
    for (size_t i = 0; i < *count && i < graph->nodes.size(); ++i) {
      nodes[i] = reinterpret_cast<cudaGraphNode_t>(graph->nodes[i].get());
    }
  }
  *count = graph->nodes.size();
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t handle, cudaGraphNode_t *out,
                                                       cudaGraphEdgeData *, size_t *count) {
  const Guard guard(lock());
  const auto &dependencies = reinterpret_cast<Node *>(handle)->dependencies;
  size_t i = 0;
  for (Node *node : dependencies) {
    if (out != nullptr && i < *count) out[i++] = reinterpret_cast<cudaGraphNode_t>(node);
  }
  *count = dependencies.size();
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaGraphAddNode(cudaGraphNode_t *out, cudaGraph_t handle,
                                           const cudaGraphNode_t *dependencies, const cudaGraphEdgeData *, size_t count,
                                           cudaGraphNodeParams *parameters) {
  const Guard guard(lock());
  if (parameters->type != cudaGraphNodeTypeEmpty) return fail(cudaErrorNotSupported, "cudaGraphAddNode");
  std::set<Node *> all;
  for (size_t i = 0; i < count; ++i) all.insert(reinterpret_cast<Node *>(dependencies[i]));
  *out = reinterpret_cast<cudaGraphNode_t>(add_node(*reinterpret_cast<Graph *>(handle), "empty", all, nullptr));
  return cudaSuccess;
}
