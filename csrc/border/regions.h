// The border between the program's autocast regions and what this crate computes itself, which obeys none of them:
// neither autocast's lists nor overrides of these.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

namespace tamp {

// The dispatch key of the overrides of autocast's lists. libtorch keeps it for extensions and uses it for nothing
// itself.
inline constexpr auto kOverrides = c10::DispatchKey::DeferredInit;

// The dispatch keys of emulated half precision: before all others, and after autograd. libtorch keeps them for its tests
// and for extensions.
inline constexpr auto kEmulatedCalls = c10::DispatchKey::TESTING_ONLY_GenericMode;
inline constexpr auto kEmulatedRuns = c10::DispatchKey::Fake;
inline constexpr c10::DispatchKeySet kEmulation({kEmulatedCalls, kEmulatedRuns});

// How often the calling thread has stepped out of its regions, and the keys of these while it is outside.
struct Outside {
  int depth = 0;
  c10::DispatchKeySet regions;
};

inline thread_local Outside outside;

inline void set_excluded(c10::impl::LocalDispatchKeySet local, c10::DispatchKeySet excluded) {
  local.excluded_ = excluded;
  c10::impl::_force_tls_local_dispatch_key_set(local);
}

// Switches off what the regions of the thread have switched on, and returns it. Outside of all regions it only reads.
inline c10::DispatchKeySet leave_regions() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto included = local.included_ & (kEmulation | c10::DispatchKeySet(kOverrides));
  const auto regions = (c10::autocast_dispatch_keyset | included) - local.excluded_;
  if (!regions.empty()) set_excluded(local, local.excluded_ | regions);
  return regions;
}

inline void return_to_regions(c10::DispatchKeySet regions) {
  if (regions.empty()) return;
  const auto local = c10::impl::tls_local_dispatch_key_set();
  set_excluded(local, local.excluded_ - regions);
}

inline void step_outside() {
  if (outside.depth++ == 0) outside.regions = leave_regions();
}

inline void step_inside() {
  if (--outside.depth == 0) return_to_regions(std::exchange(outside.regions, {}));
}

// While it exists, the thread computes outside of its regions.
class OutsideRegions {
 public:
  OutsideRegions() { step_outside(); }
  OutsideRegions(const OutsideRegions &) = delete;
  OutsideRegions &operator=(const OutsideRegions &) = delete;
  ~OutsideRegions() { step_inside(); }
};

// While it exists, the thread is in its regions again, for code of the program that runs during a computation of this
// crate. A region that is opened or closed meanwhile stays so.
class InsideRegions {
 public:
  InsideRegions() : depth_(std::exchange(outside.depth, 0)) {
    if (depth_ > 0) return_to_regions(std::exchange(outside.regions, {}));
  }
  InsideRegions(const InsideRegions &) = delete;
  InsideRegions &operator=(const InsideRegions &) = delete;
  ~InsideRegions() {
    if (depth_ > 0) outside.regions = leave_regions();
    outside.depth = depth_;
  }

 private:
  int depth_;
};

}  // namespace tamp
