#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "../null_cuda.h"
#include "captures.h"
#include "devices.h"
#include "faults.h"
#include "pinned.h"
#include "ranges.h"
#include "record.h"
#include "settings.h"

namespace null_cuda {
namespace {

using simulated::Ranges;

constexpr uint64_t kFirstAddress = 0x200000000000, kBetweenDevices = 0x10000000000, kToView = 0x100000000000;
constexpr size_t kLarge = size_t{1} << 20, kLargeAlignment = size_t{2} << 20;

char *view_of(uint64_t address) { return reinterpret_cast<char *>(address + kToView); }

void *map_at(uint64_t address, size_t size, int protection, int flags, int file) {
  return mmap(reinterpret_cast<void *>(address), size, protection, flags | MAP_FIXED_NOREPLACE | MAP_NORESERVE, file,
              0);
}

// The memory of one device. Its pages take real memory once they are used.
class Arena {
 public:
  void open(int device) {
    if (size_ != 0) return;
    size_ = simulated::device_memory();
    base_ = kFirstAddress + static_cast<uint64_t>(device) * kBetweenDevices;
    file_ = memfd_create("null_cuda", MFD_CLOEXEC);
    if (file_ < 0 || ftruncate(file_, static_cast<off_t>(size_)) != 0 ||
        map_at(base_, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1) == MAP_FAILED ||
        map_at(base_ + kToView, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file_) == MAP_FAILED) {
      perror("null CUDA: no address space for a device (SIMULATED_CUDA_MEMORY_MIB sets its size)");
      abort();
    }
    ranges_.add(base_, size_);
  }

  size_t size() const { return size_; }
  size_t used() const { return used_; }
  bool holds(uint64_t address, size_t size) const { return ranges_.holds(address, size); }

  uint64_t take(size_t size) {
    size = Ranges::rounded(size);
    const auto at = ranges_.take(size, size >= kLarge ? kLargeAlignment : Ranges::kGranularity);
    if (at) used_ += size;
    return at.value_or(0);
  }

  // Returns whether something was allocated at this address.
  bool give_back(uint64_t at) {
    const size_t size = ranges_.give_back(at);
    if (size == 0) return false;
    used_ -= size;
    // Whole pages go back to the system.
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at - base_),
              static_cast<off_t>(size));
    return true;
  }

 private:
  int file_ = -1;
  uint64_t base_ = 0;
  size_t size_ = 0, used_ = 0;
  Ranges ranges_;
};

// Never destroyed: tensors in statics are freed after everything else.
Arena &arena(int device) {
  static auto *const all = new std::array<Arena, simulated::kMostDevices>;
  Arena &out = all->at(static_cast<size_t>(device));
  out.open(device);
  return out;
}

cudaError_t allocate(void **out, size_t size, const char *function) {
  const Guard guard(lock());
  if (const cudaError_t error = check_unsafe(function)) return error;
  *out = size == 0 ? nullptr : take(size);
  if (size == 0) return cudaSuccess;
  note(std::string("memory/") + function, current_device());
  return *out == nullptr ? fail(cudaErrorMemoryAllocation, function) : cudaSuccess;
}

cudaError_t release(void *pointer, const char *function) {
  const Guard guard(lock());
  if (const cudaError_t error = check_unsafe(function)) return error;
  if (pointer == nullptr) return cudaSuccess;
  const int device = device_of(pointer);
  if (device < 0 || !arena(device).give_back(reinterpret_cast<uint64_t>(pointer))) {
    return fail(cudaErrorInvalidValue, function);
  }
  return cudaSuccess;
}

simulated::Where locate(const void *address) {
  return {device_of(address), (reinterpret_cast<uint64_t>(address) - kFirstAddress) % kBetweenDevices};
}

const bool faults_are_told = simulated::tell_faults("null CUDA", locate);

}  // namespace

int device_of(const void *address) {
  const auto at = reinterpret_cast<uint64_t>(address);
  const uint64_t end = kFirstAddress + simulated::kMostDevices * kBetweenDevices;
  return at < kFirstAddress || at >= end ? -1 : static_cast<int>((at - kFirstAddress) / kBetweenDevices);
}

std::optional<Place> find(const void *address, size_t size) {
  const auto at = reinterpret_cast<uint64_t>(address);
  const int device = device_of(address);
  if (device >= 0) {
    if (!arena(device).holds(at, size)) return std::nullopt;
    return Place{Place::Kind::kDevice, device, view_of(at)};
  }
  auto *view = static_cast<char *>(const_cast<void *>(address));
  return Place{is_pinned(address) ? Place::Kind::kPinned : Place::Kind::kPageable, -1, view};
}

void *take(size_t size) { return reinterpret_cast<void *>(arena(current_device()).take(size)); }

}  // namespace null_cuda

using namespace null_cuda;

NULL_CUDA_API cudaError_t cudaMalloc(void **out, size_t size) { return allocate(out, size, "cudaMalloc"); }
NULL_CUDA_API cudaError_t cudaFree(void *pointer) { return release(pointer, "cudaFree"); }

NULL_CUDA_API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  const Guard guard(lock());
  const Arena &mine = arena(current_device());
  *free = mine.size() - mine.used();
  *total = mine.size();
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *pointer) {
  const Guard guard(lock());
  *out = {};
  out->type = cudaMemoryTypeUnregistered;
  out->device = cudaInvalidDeviceId;
  const auto place = find(pointer, 1);
  const bool is_device = place && place->kind == Place::Kind::kDevice;
  if (!is_device) out->hostPointer = const_cast<void *>(pointer);
  if (!place || place->kind == Place::Kind::kPageable) return cudaSuccess;
  out->type = is_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  out->device = is_device ? place->device : 0;
  out->devicePointer = const_cast<void *>(pointer);
  return cudaSuccess;
}

NULL_CUDA_API void *null_cuda_host_view(const void *address, size_t size) {
  const Guard guard(lock());
  const auto place = find(address, size);
  return place ? place->view : nullptr;
}
