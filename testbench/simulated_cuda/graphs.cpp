// libtorch_cuda's class of graphs, which the simulated GPUs do not have: testbench/null_cuda/ has the real one.

#include <ATen/core/Generator.h>
#include <c10/util/Exception.h>

#include <utility>

enum cudaStreamCaptureMode { cudaStreamCaptureModeNone };

namespace at::cuda {

struct CUDAGraph {
  explicit CUDAGraph(bool);
  ~CUDAGraph();
  void capture_begin(std::pair<unsigned long long, unsigned long long>, cudaStreamCaptureMode);
  void capture_end();
  void replay();
};

namespace {
constexpr const char *kNone = "simulated GPUs have no graphs; run this on null CUDA";
}

CUDAGraph::CUDAGraph(bool) { TORCH_CHECK(false, kNone); }
CUDAGraph::~CUDAGraph() = default;
void CUDAGraph::capture_begin(std::pair<unsigned long long, unsigned long long>, cudaStreamCaptureMode) {
  TORCH_CHECK(false, kNone);
}
void CUDAGraph::capture_end() { TORCH_CHECK(false, kNone); }
void CUDAGraph::replay() { TORCH_CHECK(false, kNone); }

}  // namespace at::cuda
