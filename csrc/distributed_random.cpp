// Random numbers that have to be the same on all ranks, or different on each. This source needs no headers of c10d.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include "guarded.h"
#include "shim_distributed.h"

extern "C" {

tamp_tensor *tamp_random_permutation(int64_t n, uint64_t seed, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const at::Generator own = at::detail::createCPUGenerator(seed);
    return tamp::give(at::randperm(n, own, at::TensorOptions(at::kCPU).dtype(at::kLong)));
  });
}

}  // extern "C"
