// What a timed recording notes of an operator.

#include <ATen/autocast_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <chrono>

#include "insight/recording.h"

namespace tamp {

int64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

void add_devices(std::vector<c10::Device> &devices, c10::ArrayRef<const c10::IValue> values) {
  for (const c10::IValue &value : values) {
    for_each_tensor(value, [&](const at::Tensor &t) {
      const c10::Device device = t.device();
      const bool known = std::find(devices.begin(), devices.end(), device) != devices.end();
      if (!known && !device.is_cpu() && !device.is_meta()) devices.push_back(device);
    });
  }
}

void synchronize(const std::vector<c10::Device> &devices) {
  for (const c10::Device &device : devices) {
    c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
  }
}

uint32_t flags_of(c10::ArrayRef<const c10::IValue> arguments) {
  uint32_t flags = 0, place = 0;
  const auto add = [&](bool flag) {
    if (flag && place < 32) flags |= uint32_t{1} << place;
    ++place;
  };
  for (const c10::IValue &argument : arguments) {
    if (argument.isBool()) add(argument.toBool());
    if (argument.isBoolList()) {
      for (const bool flag : argument.toBoolList()) add(flag);
    }
  }
  return flags;
}

int8_t autocast_of(c10::ArrayRef<const c10::IValue> arguments) {
  auto device = c10::DeviceType::CPU;
  bool found = false;
  for (const c10::IValue &argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor &t) {
      // A number on the CPU takes part in operators of every device.
      if (!found || device == c10::DeviceType::CPU) device = t.device().type();
      found = true;
    });
  }
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return -1;
  return static_cast<int8_t>(at::autocast::get_autocast_dtype(device));
}

void describe_layout(tamp_recorded_tensor &out, const at::Tensor &t) {
  out.dtype = static_cast<int8_t>(t.scalar_type());
  out.element_bytes = static_cast<uint8_t>(t.element_size());
  out.device_type = static_cast<int8_t>(t.device().type());
  out.device_index = t.device().index();
  if (t.is_nested()) return;
  const auto sizes = t.sizes();
  out.dims = static_cast<uint8_t>(std::min<size_t>(sizes.size(), TAMP_MOST_SIZES));
  std::copy_n(sizes.begin(), out.dims, out.sizes);
}

}  // namespace tamp
