// The backend for CUDA tensors.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "distributed/distributed.h"

#ifdef TAMP_WITH_CUDA

// libtorch's own header needs those of CUDA and NCCL, which a program that uses libtorch need not have. This declares
// what libtorch_cuda defines; no member of the classes is used.
namespace c10d {

// More than the classes take: 1152 and 256 bytes in libtorch 2.13.
constexpr size_t kRoom = size_t{1} << 16;

class __attribute__((visibility("default"))) ProcessGroupNCCL : public Backend {
 public:
  struct __attribute__((visibility("default"))) Options : Backend::Options {
    explicit Options(bool is_high_priority_stream);
    ~Options() override;
    char room[kRoom];
  };

  ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~ProcessGroupNCCL() override;
  char room[kRoom];
};

}  // namespace c10d

c10::intrusive_ptr<c10d::Backend> tamp::distributed::nccl(const c10::intrusive_ptr<c10d::Store> &store, int rank,
                                                          int size, std::chrono::milliseconds timeout) {
  auto options = c10::make_intrusive<c10d::ProcessGroupNCCL::Options>(/*is_high_priority_stream=*/false);
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>("nccl", store), rank, size,
                                                     options);
}

#else

c10::intrusive_ptr<c10d::Backend> tamp::distributed::nccl(const c10::intrusive_ptr<c10d::Store> &, int, int,
                                                          std::chrono::milliseconds) {
  TORCH_CHECK(false, "this libtorch is one without CUDA, and has no NCCL");
}

#endif
