// Activations that wait for the backward pass in the memory of the host. A device copies them there on a stream of its
// own, and back before the backward pass asks for them: with each that it asks for, the one that was copied before. The
// host waits for none of it.

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "border/guarded.h"
#include "gradients/storage.h"
#include "saved_tensors/copies.h"

namespace tamp {
namespace {

using at::Tensor;

// The stream of a device on which tensors are copied.
c10::Stream copying_stream(c10::Device device) {
  static std::mutex mutex;
  static auto *const streams = new std::unordered_map<c10::Device, c10::Stream>();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = streams->find(device);
  if (known != streams->end()) return known->second;
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  return streams->emplace(device, stream).first->second;
}

// A tensor of a device, in pinned memory.
class HostCopy final : public SharedCopy {
 public:
  // `before` is the one that was copied before.
  HostCopy(const Tensor &t, const CopyKey &key, std::weak_ptr<HostCopy> before)
      : SharedCopy(t, key),
        device_(t.device()),
        guard_(device_.type()),
        stream_(copying_stream(device_)),
        before_(std::move(before)),
        copy_(at::empty({t.numel()}, t.options().device(at::kCPU).pinned_memory(true))) {
    order(guard_.getStream(device_), stream_);
    const c10::StreamGuard on(stream_);
    copy_.copy_(numbers_of(t), /*non_blocking=*/true);
    guard_.recordDataPtrOnStream(t.storage().data_ptr(), stream_);
  }

  // See tamp_arrival_free.
  ~HostCopy() override { keep_if_captured(copy_); }

  // The numbers on the device, for what the current stream is given from now on.
  Tensor numbers() override {
    Tensor out;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      fetch();
      out = std::exchange(fetched_, Tensor());
    }
    const auto current = guard_.getStream(device_);
    order(stream_, current);
    guard_.recordDataPtrOnStream(out.storage().data_ptr(), current);
    if (const auto next = before_.lock()) next->fetch_ahead();
    return out;
  }

 private:
  // Makes what `later` is given from now on wait, on the device, for what `earlier` was given.
  void order(const c10::Stream &earlier, const c10::Stream &later) const {
    c10::Event event(device_.type());
    event.record(earlier);
    event.block(later);
  }

  // If there is no room now, it is fetched when it is asked for.
  void fetch_ahead() {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      fetch();
    } catch (const c10::OutOfMemoryError &) {
    }
  }

  void fetch() {
    if (fetched_.defined()) return;
    const c10::StreamGuard on(planted("unordered_fetch") ? guard_.getStream(device_) : stream_);
    Tensor out = at::empty(copy_.sizes(), copy_.options().device(device_).pinned_memory(false));
    out.copy_(copy_, /*non_blocking=*/true);
    fetched_ = std::move(out);
  }

  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;
  std::weak_ptr<HostCopy> before_;
  Tensor copy_;
  std::mutex mutex_;
  Tensor fetched_;  // until it is asked for
};

class MovingToHost final : public Keeper {
 public:
  std::unique_ptr<Kept> keep(const Tensor &saved) override {
    if (!saved.is_cuda()) return nullptr;
    if (!is_activation(saved)) return keep_small_part(saved);
    TORCH_CHECK(!is_capturing(),
                "a captured iteration does not allow `SavedTensors::on_host`, which copies to the host: use "
                "`SavedTensors::half` or `fp8_rows`, whose copies stay on the device");
    const at::AutoDispatchBelowADInplaceOrView numbers_only;
    return SharedCopies::keep(saved, CopyFormat::kOnHost, [&](const CopyKey &key) { return next(saved, key); });
  }

  bool is_exact() const override { return true; }

 private:
  std::shared_ptr<HostCopy> next(const Tensor &t, const CopyKey &key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto &last = last_[t.device()];
    auto copy = std::make_shared<HostCopy>(t, key, last);
    last = copy;
    return copy;
  }

  std::mutex mutex_;
  std::unordered_map<c10::Device, std::weak_ptr<HostCopy>> last_;
};

}  // namespace

std::shared_ptr<Keeper> keeper_on_host() { return std::make_shared<MovingToHost>(); }

}  // namespace tamp
