#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "counters.h"
#include "devices.h"
#include "faults.h"
#include "ranges.h"
#include "settings.h"
#include "simulated_cuda.h"

namespace simulated {
namespace {

constexpr size_t kPage = 4096;
constexpr int kFresh = 0xff;  // NaN in every floating dtype: a device does not hand out zeros

// Counts down to the allocation that fails; zero when none is to.
std::atomic<int64_t> countdown{0};

bool fails_now() {
  int64_t left = countdown;
  while (left > 0 && !countdown.compare_exchange_weak(left, left - 1)) {
  }
  return left == 1;
}

char *map(size_t bytes, int protection) {
  if (bytes == 0) return nullptr;  // without devices
  void *p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    perror("simulated CUDA: no address space for the devices (SIMULATED_CUDA_MEMORY_MIB sets their size)");
    abort();
  }
  return static_cast<char *>(p);
}

class Arena {
 public:
  Arena() {
    for (size_t device = 0; device < devices_.size(); ++device) devices_[device].add(each_ * device, each_);
  }

  bool owns(const void *p) const { return p >= seen_ && p < seen_ + size_; }
  size_t offset(const void *p) const { return static_cast<size_t>(static_cast<const char *>(p) - seen_); }
  size_t each() const { return each_; }
  char *for_kernels(const void *p) const { return kernels_ + offset(p); }

  void *take(c10::DeviceIndex device, size_t bytes) {
    const size_t need = Ranges::rounded(bytes);
    const bool planted = fails_now();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = planted ? std::nullopt : devices_[static_cast<size_t>(device)].take(need);
    TORCH_CHECK_WITH(OutOfMemoryError, at, "CUDA out of memory. Tried to allocate ", bytes, " bytes (",
                     planted ? "a planted failure" : "the simulated device is full", ")");
    note_allocation(device, need);
    memset(kernels_ + *at, kFresh, need);
    return seen_ + *at;
  }

  void give_back(void *p) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t at = offset(p), room = devices_[at / each_].give_back(at);
    note_release(static_cast<c10::DeviceIndex>(at / each_), room);
    forget(at, room);
  }

 private:
  // What was there must not be read again by accident. Large blocks go back to the system, whole pages of them.
  void forget(size_t at, size_t room) {
    if (room < (size_t{1} << 20)) {
      memset(kernels_ + at, kFresh, room);
      return;
    }
    const size_t first = (at + kPage - 1) / kPage * kPage, last = (at + room) / kPage * kPage;
    madvise(kernels_ + first, last - first, MADV_DONTNEED);
  }

  const size_t each_ = device_memory();
  const size_t size_ = each_ * static_cast<size_t>(device_count());
  char *const seen_ = map(size_, PROT_NONE);
  char *const kernels_ = map(size_, PROT_READ | PROT_WRITE);
  std::mutex mutex_;
  std::vector<Ranges> devices_{static_cast<size_t>(device_count())};  // by offset
};

// Never destroyed: tensors in statics are freed after everything else.
Arena &arena() {
  static Arena *const it = new Arena;
  return *it;
}

// It keeps no freed memory, so that what it has reserved is what is allocated.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr &, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    constexpr auto kAll = static_cast<size_t>(c10::CachingDeviceAllocator::StatType::AGGREGATE);
    const Usage bytes = usage(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto *of : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*of)[kAll].current = bytes.now;
      (*of)[kAll].peak = bytes.peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_usage_peak(device); }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kCUDA, current_device());
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    void *p = arena().take(device.index(), bytes);
    return {p, p, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *to, const void *from, size_t bytes) const override {
    memcpy(host_address(to), host_address(from), bytes);
  }

 private:
  static void release(void *p) {
    if (p != nullptr) arena().give_back(p);
  }
};

DeviceAllocator allocator;
const c10::AllocatorRegisterer<c10::kCUDA> registered(&allocator);

Where locate(const void *address) {
  if (!arena().owns(address)) return {-1, 0};
  const size_t at = arena().offset(address);
  return {static_cast<int>(at / arena().each()), at % arena().each()};
}

const bool faults_are_told = arena().each() > 0 && tell_faults("simulated CUDA", locate);

}  // namespace

c10::Allocator &device_allocator() { return allocator; }

void *host_address(const void *address) {
  if (address == nullptr) return nullptr;
  TORCH_INTERNAL_ASSERT(arena().owns(address), "a CUDA tensor over memory that no simulated device has");
  return arena().for_kernels(address);
}

c10::DeviceIndex device_of(const void *address) { return static_cast<c10::DeviceIndex>(locate(address).device); }

}  // namespace simulated

extern "C" int64_t simulated_cuda_fail_allocation(int64_t n) { return simulated::countdown.exchange(n); }
