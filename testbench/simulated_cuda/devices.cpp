#include "devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>

#include "arrivals.h"
#include "counters.h"
#include "settings.h"

namespace simulated {
namespace {

thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kMostDevices> streams = {};

void check(c10::DeviceIndex device) {
  TORCH_CHECK(device < device_count(), "CUDA error: invalid device ordinal (there are ", device_count(),
              " simulated devices)");
}

// What was sent before the event was recorded, and the last copy after which its stream was ordered.
struct Event {
  c10::DeviceIndex device = 0;
  uint64_t sent = 0;
  int64_t queries = 0;
  uint64_t last = 0;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(c10::kCUDA, exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, current); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < simulated::device_count()) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(simulated::device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    device = whole(device);
    check(device.index());
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream{c10::Stream::DEFAULT, whole(device)};
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream{c10::Stream::UNSAFE, whole(device), ++last};
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto &place = streams.at(static_cast<size_t>(stream.device_index()));
    const c10::Stream before{c10::Stream::UNSAFE, stream.device(), place};
    place = stream.id();
    return before;
  }
  // Kernels have finished when their launch returns; only copies to pinned memory are late.
  bool queryStream(const c10::Stream &) const override { return true; }
  void synchronizeStream(const c10::Stream &stream) const override {
    note_wait(stream.device_index(), Wait::kStream, "synchronize");
    arrive_all();
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize(device); }

  void record(void **event, const c10::Stream &stream, c10::DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device index ", int{device},
                " does not match recording stream's device index ", int{stream.device_index()}, ".");
    if (*event == nullptr) *event = new Event;
    *static_cast<Event *>(*event) = {stream.device_index(), sent(), 0, last_before(stream)};
  }
  void block(void *event, const c10::Stream &stream) const override {
    if (event != nullptr) order_after(stream, static_cast<Event *>(event)->last);
  }
  bool queryEvent(void *event) const override {
    auto *it = static_cast<Event *>(event);
    if (it == nullptr || has_arrived(it->sent)) return true;
    if (it->queries < lag()) {
      ++it->queries;
      return false;
    }
    arrive(it->sent);
    return true;
  }
  void synchronizeEvent(void *event) const override {
    const auto *it = static_cast<Event *>(event);
    if (it == nullptr) return;
    note_wait(it->device, Wait::kEvent, "synchronize");
    arrive(it->sent);
  }
  void destroyEvent(void *event, c10::DeviceIndex) const noexcept override { delete static_cast<Event *>(event); }
};

const c10::impl::DeviceGuardImplRegistrar registered(c10::kCUDA, new Guard);

}  // namespace

c10::DeviceIndex current_device() { return current; }

c10::Stream current_stream(c10::Device device) {
  return c10::Stream{c10::Stream::UNSAFE, device, streams.at(static_cast<size_t>(device.index()))};
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  check(device);
  const c10::DeviceIndex before = current;
  if (device >= 0) current = device;
  return before;
}

c10::Device whole(c10::Device device) { return {c10::kCUDA, device.index() < 0 ? current : device.index()}; }

void synchronize(c10::DeviceIndex device) {
  note_wait(whole({c10::kCUDA, device}).index(), Wait::kStream, "synchronize the device");
  arrive_all();
}

}  // namespace simulated
