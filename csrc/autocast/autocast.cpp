// The autocast state of the calling thread. at::autocast keeps it in several variables, which these functions read and
// write together.

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <thread>

#include "autocast/overrides.h"
#include "border/deferred_destruction.h"
#include "border/guarded.h"

namespace {

namespace autocast = at::autocast;

c10::DeviceType device_type(const tamp_autocast_device &device) {
  return static_cast<c10::DeviceType>(device.device_type);
}

void read(tamp_autocast_state &state) {
  for (uint8_t i = 0; i < state.count; ++i) {
    auto &device = state.devices[i];
    device.enabled = autocast::is_autocast_enabled(device_type(device));
    device.dtype = static_cast<int8_t>(autocast::get_autocast_dtype(device_type(device)));
  }
  state.cache_enabled = autocast::is_autocast_cache_enabled();
  state.overrides = tamp::current_overrides();
}

void write(const tamp_autocast_state &state) {
  for (uint8_t i = 0; i < state.count; ++i) {
    const auto &device = state.devices[i];
    autocast::set_autocast_enabled(device_type(device), device.enabled != 0);
    autocast::set_autocast_dtype(device_type(device), static_cast<at::ScalarType>(device.dtype));
  }
  autocast::set_autocast_cache_enabled(state.cache_enabled != 0);
  tamp::set_overrides(state.overrides);
}

bool changes_dtype(const tamp_autocast_state &to) {
  for (uint8_t i = 0; i < to.count; ++i) {
    const auto &device = to.devices[i];
    const auto now = autocast::get_autocast_dtype(device_type(device));
    if (now != static_cast<at::ScalarType>(device.dtype)) return true;
  }
  return false;
}

// Clears the weight cache. libtorch frees the cached casts, and whole graphs with them, while it holds the cache's
// lock. The destructors of custom functions in these graphs may use the cache, so they are postponed.
void clear_cache() {
  const tamp::Postponement after_the_lock;
  autocast::clear_cache();
}

// Sets the state. The cache is keyed by the weight alone, so it is cleared when a dtype changes: it would return casts
// to the old one.
void change(const tamp_autocast_state &to, bool outermost) {
  const bool clear = outermost || changes_dtype(to);
  write(to);
  if (clear) clear_cache();
}

// Calls `settle` when it is destroyed, if that happens on the thread that made it.
class Settlement {
 public:
  explicit Settlement(tamp_autocast_settle settle) : settle_(settle) {}
  Settlement(const Settlement &) = delete;
  Settlement &operator=(const Settlement &) = delete;
  ~Settlement() {
    if (std::this_thread::get_id() == thread_) settle_();
  }

 private:
  tamp_autocast_settle settle_;
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace

extern "C" {

void tamp_autocast_read(tamp_autocast_state *state, char **err) noexcept {
  tamp::guarded_inside_regions(err, [&] { read(*state); });
}

void tamp_autocast_enter(const tamp_autocast_state *next, uint8_t outermost, char **err) noexcept {
  tamp::guarded_inside_regions(err, [&] {
    // This comes first, so that regions that destructors of old casts open and close count as nested.
    autocast::increment_nesting();
    try {
      change(*next, outermost != 0);
    } catch (...) {
      autocast::decrement_nesting();
      throw;
    }
  });
}

void tamp_autocast_exit(const tamp_autocast_state *previous, uint8_t outermost) noexcept {
  char *err = nullptr;
  tamp::contained(&err, [&] {
    const tamp::InsideRegions programs;
    const bool closed = autocast::decrement_nesting() == 0;
    change(*previous, closed || outermost != 0);
  });
  free(err);
}

void tamp_autocast_clear_cache(char **err) noexcept {
  // Destructors of the program may run.
  tamp::guarded_inside_regions(err, [] { clear_cache(); });
}

void tamp_regions_leave() noexcept { tamp::step_outside(); }

void tamp_regions_return() noexcept { tamp::step_inside(); }

int64_t tamp_autocast_backward() noexcept { return torch::autograd::get_current_graph_task_id(); }

void tamp_autocast_after_backward(tamp_autocast_settle settle) noexcept {
  char *err = nullptr;
  tamp::contained(&err, [&] {
    // libtorch calls queued callbacks before it restores the state of the thread, and does not call them at all if a
    // node fails. What a callback owns is destroyed in either case, with the task of the backward pass, and by then the
    // state has been restored.
    auto settlement = std::make_shared<Settlement>(settle);
    torch::autograd::Engine::get_default_engine().queue_callback([settlement] {});
  });
  free(err);
}

}  // extern "C"
