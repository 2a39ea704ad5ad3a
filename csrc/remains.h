// What custom functions leave behind, and when it is destroyed: not too deep in the stack, nor under a lock of libtorch's.
//
// Destroying a function runs code of its user's, who may use everything again, and often frees the function before it,
// which does the same.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "shim.h"

namespace tamp {

// A value of the other side, with the callback that frees it.
using Owned = std::unique_ptr<void, tamp_function_free>;

struct Remains {
  Owned state{nullptr, nullptr};
  Owned values{nullptr, nullptr};
  std::vector<torch::autograd::SavedVariable> saved{};

  bool is_empty() const { return state == nullptr && values == nullptr && saved.empty(); }
};

// What waits on a thread to be destroyed.
struct Waiting {
  Remains remains;
  Waiting *next;
};

// No destructor, so that it is there for those of the thread's other values.
struct Remaining {
  int depth = 0;
  int postponed = 0;
  Waiting *first = nullptr;
};

inline thread_local Remaining remaining;

// How many destructors may run inside of each other. Up to here what a destructor drops is gone when it goes on.
inline constexpr int kDeepest = 8;

// Destroys what waits, one after the other.
inline void destroy_waiting() noexcept {
  ++remaining.depth;
  while (remaining.postponed == 0 && remaining.first != nullptr) {
    const std::unique_ptr<Waiting> last(remaining.first);
    remaining.first = last->next;
  }
  --remaining.depth;
}

// Destroys `remains`: at once, or when the destructors end that it would nest too deeply in, or the postponement.
inline void destroy(Remains remains) noexcept {
  if (remains.is_empty()) return;
  if (remaining.postponed > 0 || remaining.depth >= kDeepest) {
    auto *waiting = new (std::nothrow) Waiting{std::move(remains), remaining.first};
    if (waiting != nullptr) {
      remaining.first = waiting;
      return;
    }
  }
  ++remaining.depth;
  {
    const Remains now(std::move(remains));
  }
  --remaining.depth;
  if (remaining.first != nullptr) destroy_waiting();
}

// While it exists, nothing is destroyed on this thread.
class Postponement {
 public:
  Postponement() { ++remaining.postponed; }
  Postponement(const Postponement &) = delete;
  Postponement &operator=(const Postponement &) = delete;
  ~Postponement() {
    --remaining.postponed;
    if (remaining.first != nullptr) destroy_waiting();
  }
};

}  // namespace tamp
