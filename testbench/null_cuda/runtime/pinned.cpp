#include "pinned.h"

#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <vector>

#include "captures.h"
#include "devices.h"
#include "record.h"

namespace null_cuda {
namespace {

struct Block {
  size_t size;
  bool is_ours;  // and not registered memory of the program
};

// By address. Never destroyed, like the memory of the devices.
std::map<uint64_t, Block> &blocks() {
  static auto *const all = new std::map<uint64_t, Block>;
  return *all;
}

struct Copy {
  uint64_t number;
  char *to;
  std::vector<char> bytes;
};

std::deque<Copy> &copies() {
  static auto *const all = new std::deque<Copy>;
  return *all;
}
uint64_t count_sent = 0;

void write(const Copy &copy) { memcpy(copy.to, copy.bytes.data(), copy.bytes.size()); }

}  // namespace

bool is_pinned(const void *address) {
  const auto at = reinterpret_cast<uint64_t>(address);
  const auto after = blocks().upper_bound(at);
  return after != blocks().begin() && at < std::prev(after)->first + std::prev(after)->second.size;
}

uint64_t send(char *to, const char *from, size_t size) {
  copies().push_back({++count_sent, to, std::vector<char>(from, from + size)});
  memset(to, 0xff, size);
  return count_sent;
}

uint64_t sent() { return count_sent; }

void arrive(uint64_t count) {
  while (!copies().empty() && copies().front().number <= count) {
    write(copies().front());
    copies().pop_front();
  }
}

void arrive_for(const char *memory, size_t size, uint64_t count) {
  auto &all = copies();
  for (auto copy = all.begin(); copy != all.end() && copy->number <= count;) {
    if (copy->to < memory + size && memory < copy->to + copy->bytes.size()) {
      write(*copy);
      copy = all.erase(copy);
    } else {
      ++copy;
    }
  }
}

void arrive_all() { arrive(std::numeric_limits<uint64_t>::max()); }

}  // namespace null_cuda

using namespace null_cuda;

NULL_CUDA_API cudaError_t cudaHostAlloc(void **out, size_t size, unsigned) {
  const Guard guard(lock());
  if (const cudaError_t error = check_unsafe("cudaHostAlloc")) return error;
  *out = nullptr;
  if (size == 0) return cudaSuccess;
  void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return fail(cudaErrorMemoryAllocation, "cudaHostAlloc");
  blocks()[reinterpret_cast<uint64_t>(memory)] = {size, true};
  note("memory/cudaHostAlloc", current_device());
  *out = memory;
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaFreeHost(void *pointer) {
  const Guard guard(lock());
  if (pointer == nullptr) return cudaSuccess;
  if (const cudaError_t error = check_unsafe("cudaFreeHost")) return error;
  const auto block = blocks().find(reinterpret_cast<uint64_t>(pointer));
  if (block == blocks().end() || !block->second.is_ours) return fail(cudaErrorInvalidValue, "cudaFreeHost");
  arrive_all();
  munmap(pointer, block->second.size);
  blocks().erase(block);
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned) {
  const Guard guard(lock());
  if (const cudaError_t error = check_unsafe("cudaHostRegister")) return error;
  blocks()[reinterpret_cast<uint64_t>(pointer)] = {size, false};
  note("memory/cudaHostRegister", current_device());
  return cudaSuccess;
}

NULL_CUDA_API cudaError_t cudaHostUnregister(void *pointer) {
  const Guard guard(lock());
  arrive_all();
  const bool was_registered = blocks().erase(reinterpret_cast<uint64_t>(pointer)) != 0;
  return was_registered ? cudaSuccess : fail(cudaErrorInvalidValue, "cudaHostUnregister");
}
