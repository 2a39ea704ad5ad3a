#include "allocations.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "../api.h"
#include "../null_cuda.h"
#include "simulated_cuda.h"

namespace null_cuda {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Allocate = c10::DataPtr (*)(c10::Allocator *, size_t);

// Where the allocator's class has `allocate` in its table of virtual functions, behind two destructors, and how much of
// the table is copied: the class has fewer functions.
constexpr size_t kPlace = 2, kBefore = 2, kEntries = 128;
constexpr size_t kMostFilled = size_t{64} << 20;  // larger memory is left as it is, which costs nothing
constexpr int kFresh = 0xff;                      // NaN in every floating dtype

// Counts down to the allocation that fails; zero when none is to.
std::atomic<int64_t> countdown{0};
Allocate real = nullptr;

bool fails_now() {
  int64_t left = countdown;
  while (left > 0 && !countdown.compare_exchange_weak(left, left - 1)) {
  }
  return left == 1;
}

// The allocator hands out memory again that was freed. What was there must not be read by accident.
c10::DataPtr allocate(c10::Allocator *self, size_t size) {
  const bool is_planted = size > 0 && fails_now();
  TORCH_CHECK_WITH(OutOfMemoryError, !is_planted, "CUDA out of memory. Tried to allocate ", size,
                   " bytes (a planted failure)");
  c10::DataPtr out = real(self, size);
  void *view = size > 0 && size <= kMostFilled ? null_cuda_host_view(out.get(), size) : nullptr;
  if (view != nullptr) memset(view, kFresh, size);
  return out;
}

}  // namespace

bool has_allocator() { return allocator::allocator.load() != nullptr && allocator::get()->initialized(); }

// The table of virtual functions is replaced by one with another `allocate`.
void watch_allocations() {
  static std::atomic<bool> is_watched{false};
  if (is_watched || !has_allocator()) return;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> guard(mutex);
  if (is_watched) return;
  void **&table = *reinterpret_cast<void ***>(static_cast<c10::Allocator *>(allocator::get()));
  auto **replaced = new void *[kBefore + kEntries];
  std::copy(table - kBefore, table + kEntries, replaced);
  real = reinterpret_cast<Allocate>(table[kPlace]);
  replaced[kBefore + kPlace] = reinterpret_cast<void *>(&allocate);
  table = replaced + kBefore;
  is_watched = true;
}

}  // namespace null_cuda

NULL_CUDA_API int64_t simulated_cuda_fail_allocation(int64_t n) {
  null_cuda::watch_allocations();
  return null_cuda::countdown.exchange(n);
}
