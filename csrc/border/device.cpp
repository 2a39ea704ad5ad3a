// CUDA in this libtorch, and asynchronous copies of numbers to the host.

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/headeronly/version.h>

#include <algorithm>

#include "border/guarded.h"
#include "gradients/storage.h"

struct tamp_arrival {
  at::Tensor copy;
  c10::Event event;

  void begin(const at::Tensor &from) {
    const c10::NoGradGuard no_grad;
    // Of a view that is conjugated or negated, libtorch would conjugate or negate the copy before it has arrived.
    copy.copy_(from.resolve_conj().resolve_neg(), /*non_blocking=*/true);
    event.record(c10::impl::VirtualGuardImpl(from.device().type()).getStream(from.device()));
  }
};

#ifdef TAMP_WITH_CUDA
namespace at::cuda {
int warp_size();
}

// Keeps libtorch_cuda linked. The linker drops a library that nothing refers to, and then a program that was built
// against a CUDA libtorch has no CUDA. It never drops a constructor, and this one refers to a symbol that only
// libtorch_cuda defines, without calling it.
__attribute__((constructor)) static void tamp_keep_cuda() {
  int (*volatile symbol)() = &at::cuda::warp_size;
  (void)symbol;
}
#endif

extern "C" {

void tamp_string_free(char *text) noexcept { free(text); }

char *tamp_string_new(const char *text) noexcept { return tamp::message(text); }

uint8_t tamp_cuda_is_linked(void) noexcept {
#ifdef TAMP_WITH_CUDA
  return 1;
#else
  return 0;
#endif
}

const char *tamp_libtorch_version() noexcept { return TORCH_VERSION; }

void tamp_cuda_initialize(char **err) noexcept {
  tamp::guarded(err, [] { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); });
}

uint8_t tamp_cuda_has_bf16(int8_t device, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    const c10::DeviceGuard guard(c10::Device(c10::kCUDA, device));
    // The hook that asks for the generation of the current device, from which on it has them.
    return at::detail::getCUDAHooks().supportsBFloat16ConvolutionWithCuDNNv8();
  });
}

uint8_t tamp_matmul_precision(uint8_t precision, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    const auto before = at::globalContext().float32MatmulPrecision();
    const char *const names[] = {"highest", "high", "medium"};
    TORCH_CHECK(precision <= TAMP_MATMUL_MEDIUM, "matrix products have no precision ", static_cast<int>(precision));
    at::globalContext().setFloat32MatmulPrecision(names[precision]);
    return before == at::Float32MatmulPrecision::HIGHEST ? TAMP_MATMUL_HIGHEST
           : before == at::Float32MatmulPrecision::HIGH  ? TAMP_MATMUL_HIGH
                                                         : TAMP_MATMUL_MEDIUM;
  });
}

uint8_t tamp_reduced_precision_reduction(uint8_t allowed, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    at::Context &context = at::globalContext();
    constexpr auto kAllowed = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
    const int before = (context.allowFP16ReductionCuBLAS() == kAllowed ? TAMP_REDUCTION_FP16 : 0) |
                       (context.allowBF16ReductionCuBLAS() == kAllowed ? TAMP_REDUCTION_BF16 : 0);
    context.setAllowFP16ReductionCuBLAS((allowed & TAMP_REDUCTION_FP16) != 0);
    context.setAllowBF16ReductionCuBLAS((allowed & TAMP_REDUCTION_BF16) != 0);
    return static_cast<uint8_t>(before);
  });
}

tamp_arrival *tamp_arrival_new(const tamp_tensor *source, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const at::Tensor &from = tamp::tensor(source);
    const auto options = from.options().device(at::kCPU).pinned_memory(true);
    auto arrival = std::make_unique<tamp_arrival>(
        tamp_arrival{at::empty(from.sizes(), options), c10::Event(from.device().type())});
    arrival->begin(from);
    return arrival.release();
  });
}

void tamp_arrival_again(tamp_arrival *arrival, const tamp_tensor *source, char **err) noexcept {
  tamp::guarded(err, [&] {
    if (!arrival->event.query()) arrival->event.synchronize();
    arrival->begin(tamp::tensor(source));
  });
}

void tamp_arrival_wait(const tamp_arrival *arrival, char **err) noexcept {
  tamp::guarded(err, [&] {
    if (!arrival->event.query()) arrival->event.synchronize();
  });
}

tamp_tensor *tamp_arrival_copy(const tamp_arrival *arrival, char **err) noexcept {
  return tamp::guarded(err, [&] { return tamp::give(arrival->copy); });
}

uint8_t tamp_arrival_poll(const tamp_arrival *arrival, double *numbers, size_t count, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    if (!tamp::planted("early_read") && !arrival->event.query()) return 0;
    const at::Tensor &copy = arrival->copy;
    TORCH_CHECK(static_cast<size_t>(copy.numel()) == count, "there are ", copy.numel(), " numbers, not ", count);
    if (copy.scalar_type() == at::kDouble) {
      std::copy_n(copy.const_data_ptr<double>(), count, numbers);
    } else {
      std::copy_n(copy.const_data_ptr<float>(), count, numbers);
    }
    return 1;
  });
}

void tamp_arrival_free(tamp_arrival *arrival) noexcept {
  // If pinned memory is freed during a capture, libtorch records an event in the capture, and later asks for that event,
  // which is an error.
  if (arrival != nullptr) tamp::keep_if_captured(arrival->copy);
  delete arrival;
}

}  // extern "C"
