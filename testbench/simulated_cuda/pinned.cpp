#include "pinned.h"

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

namespace simulated {
namespace {

struct Blocks {
  std::mutex mutex;
  std::map<const char *, size_t> sizes;
};

// Never destroyed, like the memory of the devices.
Blocks &blocks() {
  static Blocks *const it = new Blocks;
  return *it;
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void *p = nullptr;
    if (posix_memalign(&p, 64, bytes == 0 ? 64 : bytes) != 0) throw std::bad_alloc();
    const std::lock_guard<std::mutex> lock(blocks().mutex);
    blocks().sizes[static_cast<char *>(p)] = bytes;
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *to, const void *from, size_t bytes) const override { memcpy(to, from, bytes); }

 private:
  static void release(void *p) {
    const std::lock_guard<std::mutex> lock(blocks().mutex);
    blocks().sizes.erase(static_cast<char *>(p));
    free(p);
  }
};

PinnedAllocator allocator;

}  // namespace

c10::Allocator &pinned_allocator() { return allocator; }

bool is_pinned(const void *address) {
  const std::lock_guard<std::mutex> lock(blocks().mutex);
  const auto &sizes = blocks().sizes;
  const auto after = sizes.upper_bound(static_cast<const char *>(address));
  if (after == sizes.begin()) return false;
  const auto block = std::prev(after);
  return static_cast<const char *>(address) < block->first + block->second;
}

}  // namespace simulated
