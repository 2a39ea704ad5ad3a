// Autocast regions of the calling thread: at::autocast keeps the state, these functions change it as one.

#include <ATen/autocast_mode.h>

#include "guarded.h"

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
}

void write(const tamp_autocast_state &state) {
  for (uint8_t i = 0; i < state.count; ++i) {
    const auto &device = state.devices[i];
    autocast::set_autocast_enabled(device_type(device), device.enabled != 0);
    autocast::set_autocast_dtype(device_type(device), static_cast<at::ScalarType>(device.dtype));
  }
  autocast::set_autocast_cache_enabled(state.cache_enabled != 0);
}

bool changes_dtype(const tamp_autocast_state &to) {
  for (uint8_t i = 0; i < to.count; ++i) {
    const auto &device = to.devices[i];
    const auto now = autocast::get_autocast_dtype(device_type(device));
    if (now != static_cast<at::ScalarType>(device.dtype)) return true;
  }
  return false;
}

// The cache is keyed by weight alone, so a cast to another dtype must not survive in it.
void change(const tamp_autocast_state &to, bool outermost) {
  const bool clear = outermost || changes_dtype(to);
  write(to);
  if (clear) autocast::clear_cache();
}

}  // namespace

extern "C" {

void tamp_autocast_read(tamp_autocast_state *state, char **err) noexcept {
  tamp::guarded(err, [&] { read(*state); });
}

void tamp_autocast_enter(const tamp_autocast_state *next, uint8_t outermost, char **err) noexcept {
  tamp::guarded(err, [&] {
    change(*next, outermost != 0);
    autocast::increment_nesting();
  });
}

void tamp_autocast_exit(const tamp_autocast_state *previous, uint8_t outermost) noexcept {
  char *err = nullptr;
  tamp::contained(&err, [&] {
    const bool closed = autocast::decrement_nesting() == 0;
    change(*previous, closed || outermost != 0);
  });
  free(err);
}

void tamp_autocast_clear_cache(char **err) noexcept {
  tamp::guarded(err, [] { autocast::clear_cache(); });
}

}  // extern "C"
