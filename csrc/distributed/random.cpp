// Random numbers that have to be the same on all ranks, or different on each. This source needs no headers of c10d.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/randperm.h>

#include <mutex>

#include "border/guarded.h"
#include "distributed/shim_distributed.h"

extern "C" {

tamp_tensor *tamp_random_permutation(int64_t n, uint64_t seed, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const at::Generator own = at::detail::createCPUGenerator(seed);
    return tamp::give(at::randperm(n, own, at::TensorOptions(at::kCPU).dtype(at::kLong)));
  });
}

void tamp_random_seed(int8_t device_type, int8_t index, uint64_t seed, char **err) noexcept {
  tamp::guarded(err, [&] {
    at::Generator gen =
        at::globalContext().defaultGenerator(at::Device(static_cast<c10::DeviceType>(device_type), index));
    const std::lock_guard<std::mutex> lock(gen.mutex());
    gen.set_current_seed(seed);
  });
}

}  // extern "C"
