// Destruction of what custom functions leave behind: neither too deep in the stack nor while libtorch holds a lock.
//
// Destroying a function runs user code, which may use everything in this crate, and often frees the previous function
// of the graph, which does the same.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "border/regions.h"
#include "border/shim.h"

namespace tamp {

// A value of the Rust side, with the callback that frees it.
using Owned = std::unique_ptr<void, tamp_function_free>;

struct Remains {
  Owned state{nullptr, nullptr};
  Owned values{nullptr, nullptr};
  std::vector<torch::autograd::SavedVariable> saved{};

  bool is_empty() const { return state == nullptr && values == nullptr && saved.empty(); }
};

// An element of a thread's list of what is still to be destroyed.
struct Waiting {
  Remains remains;
  Waiting *next;
};

// The state of destruction on a thread. It has no destructor itself, so that the destructors of other thread-local
// values can use it.
struct Remaining {
  int depth = 0;
  int postponed = 0;
  Waiting *first = nullptr;
};

inline thread_local Remaining remaining;

// How many destructors may be nested. Up to this depth, what a destructor drops is destroyed before the destructor
// continues.
inline constexpr int kDeepest = 8;

// Destroys what is in the list, one after the other.
inline void destroy_waiting() noexcept {
  const InsideRegions programs;
  ++remaining.depth;
  while (remaining.postponed == 0 && remaining.first != nullptr) {
    const std::unique_ptr<Waiting> last(remaining.first);
    remaining.first = last->next;
  }
  --remaining.depth;
}

// Destroys `remains` at once, or later if destructors are nested too deeply or destruction is postponed: then when
// those destructors or the postponement end.
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
    const InsideRegions programs;
    const Remains now(std::move(remains));
  }
  --remaining.depth;
  if (remaining.first != nullptr) destroy_waiting();
}

// Postpones destruction on this thread while it exists.
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
