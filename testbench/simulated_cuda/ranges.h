// Which parts of a device's memory are allocated, and which are free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

namespace simulated {

class Ranges {
 public:
  static constexpr size_t kGranularity = 512;  // as of CUDA's allocator
  static size_t rounded(size_t size) { return (size + kGranularity - 1) / kGranularity * kGranularity; }

  // Adds a free part, and joins it with its neighbours.
  void add(uint64_t at, size_t room) {
    auto next = free_.lower_bound(at);
    if (next != free_.end() && next->first == at + room) {
      room += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == at) {
      std::prev(next)->second += room;
    } else {
      free_[at] = room;
    }
  }

  // Allocates a rounded size in the first hole that has room for it. Nothing if there is none.
  std::optional<uint64_t> take(size_t size, size_t alignment = kGranularity) {
    for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
      const auto [start, room] = *hole;
      const uint64_t at = (start + alignment - 1) / alignment * alignment;
      if (at + size > start + room) continue;
      free_.erase(hole);
      if (at > start) free_[start] = at - start;
      if (at + size < start + room) free_[at + size] = start + room - at - size;
      allocated_[at] = size;
      return at;
    }
    return std::nullopt;
  }

  // Frees what was allocated there, and returns its size; zero if nothing was.
  size_t give_back(uint64_t at) {
    const auto found = allocated_.find(at);
    if (found == allocated_.end()) return 0;
    const size_t size = found->second;
    allocated_.erase(found);
    add(at, size);
    return size;
  }

  // Whether all of this was allocated at once.
  bool holds(uint64_t address, size_t size) const {
    const auto after = allocated_.upper_bound(address);
    return after != allocated_.begin() && address + size <= std::prev(after)->first + std::prev(after)->second;
  }

 private:
  std::map<uint64_t, size_t> allocated_, free_;
};

}  // namespace simulated
