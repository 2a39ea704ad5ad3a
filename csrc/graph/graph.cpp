// Iterations that are captured as graphs of CUDA, and replayed.

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "border/guarded.h"
#include "gradients/storage.h"

#ifdef TAMP_WITH_CUDA

// libtorch's own header needs those of CUDA, which a program that uses libtorch need not have. This declares what
// libtorch_cuda defines; no member of the class is used.
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2
};

namespace at::cuda {

// More than the class takes: 344 bytes in libtorch 2.13.
constexpr size_t kRoomOfGraph = size_t{1} << 14;

struct __attribute__((visibility("default"))) CUDAGraph {
  explicit CUDAGraph(bool keep_graph);
  ~CUDAGraph();
  CUDAGraph(const CUDAGraph &) = delete;
  CUDAGraph &operator=(const CUDAGraph &) = delete;
  void capture_begin(c10::MempoolId_t pool, cudaStreamCaptureMode mode);
  void capture_end();
  void replay();
  char room[kRoomOfGraph];
};

}  // namespace at::cuda

struct tamp_graph {
  explicit tamp_graph(c10::Device on) : device(on), guard(on.type()), side(guard.getStreamFromGlobalPool(on)) {}

  // Makes `later` wait, on the device, for what `earlier` has been given to do.
  void order(const c10::Stream &earlier, const c10::Stream &later) {
    c10::Event event(device.type());
    event.record(earlier);
    event.block(later);
  }

  c10::Device device;
  c10::impl::VirtualGuardImpl guard;
  std::unique_ptr<at::cuda::CUDAGraph> graph;  // null before the first capture
  c10::Stream side;                            // of warm-ups and of the capture, which the default stream cannot have
  std::optional<c10::Stream> before;           // the program's, while it is on the other
  std::vector<at::Tensor> kept;                // host memory that the graph copies from
};

extern "C" {

tamp_graph *tamp_graph_new(int8_t index, char **err) noexcept {
  return tamp::guarded(err, [&] {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    const c10::Device device(c10::kCUDA, index);
    const c10::DeviceGuard here(device);
    return std::make_unique<tamp_graph>(device).release();
  });
}

void tamp_graph_free(tamp_graph *graph) noexcept {
  char *err = nullptr;
  tamp::contained(&err, [&] {
    // The last replay may still read the host memory that is kept for it.
    if (graph != nullptr && !graph->kept.empty()) graph->guard.synchronizeDevice(graph->device.index());
    delete graph;
  });
  free(err);
}

void tamp_graph_enter(tamp_graph *graph, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::Stream before = graph->guard.getStream(graph->device);
    graph->order(before, graph->side);
    graph->guard.exchangeStream(graph->side);
    graph->before = before;
  });
}

void tamp_graph_leave(tamp_graph *graph, char **err) noexcept {
  tamp::guarded(err, [&] {
    if (!graph->before) return;
    const c10::Stream before = *graph->before;
    graph->before.reset();
    graph->guard.exchangeStream(before);
    graph->order(graph->side, before);
  });
}

void tamp_graph_begin(tamp_graph *graph, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::DeviceGuard here(graph->device);
    // Events that are asked for during a capture would break it; nothing is on its way after this.
    graph->guard.synchronizeDevice(graph->device.index());
    graph->graph.reset();
    graph->kept.clear();
    graph->graph = std::make_unique<at::cuda::CUDAGraph>(/*keep_graph=*/false);
    // Other threads may use the device meanwhile, for instance to load data.
    graph->graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    tamp::keep_for_replays(&graph->kept);
  });
}

void tamp_graph_end(tamp_graph *graph, char **err) noexcept {
  tamp::keep_for_replays(nullptr);
  tamp::guarded(err, [&] {
    const c10::DeviceGuard here(graph->device);
    try {
      graph->graph->capture_end();
    } catch (...) {
      // libtorch's allocator may go on asking it whether a stream is captured.
      static_cast<void>(graph->graph.release());
      throw;
    }
  });
}

void tamp_graph_replay(tamp_graph *graph, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::DeviceGuard here(graph->device);
    TORCH_CHECK(graph->graph, "there is no captured graph");
    graph->graph->replay();
  });
}

}  // extern "C"

#else

struct tamp_graph {};

extern "C" {

tamp_graph *tamp_graph_new(int8_t, char **err) noexcept {
  return tamp::guarded(err, []() -> tamp_graph * { TORCH_CHECK(false, "this libtorch has no CUDA, and no graphs"); });
}

void tamp_graph_free(tamp_graph *graph) noexcept { delete graph; }

void tamp_graph_enter(tamp_graph *, char **err) noexcept {
  tamp::guarded(err, [] {});
}

void tamp_graph_leave(tamp_graph *, char **err) noexcept {
  tamp::guarded(err, [] {});
}

void tamp_graph_begin(tamp_graph *, char **err) noexcept {
  tamp::guarded(err, [] {});
}

void tamp_graph_end(tamp_graph *, char **err) noexcept {
  tamp::guarded(err, [] {});
}

void tamp_graph_replay(tamp_graph *, char **err) noexcept {
  tamp::guarded(err, [] {});
}

}  // extern "C"

#endif

extern "C" void tamp_graph_write(tamp_tensor *to, const float *numbers, size_t count, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    at::Tensor &there = tamp::tensor(to);
    TORCH_CHECK(static_cast<size_t>(there.numel()) == count, "there is room for ", there.numel(), " numbers, not ",
                count);
    // libtorch gives pinned memory to nobody else before the copy has been made.
    const auto options = at::TensorOptions(at::kFloat).pinned_memory(there.is_cuda());
    const at::Tensor here = at::empty(there.sizes(), options);
    std::copy_n(numbers, count, here.mutable_data_ptr<float>());
    there.copy_(here, /*non_blocking=*/there.is_cuda());
  });
}
