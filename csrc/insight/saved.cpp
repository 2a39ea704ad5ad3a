// What autograd saves in a recording.

#include "insight/recorder.h"

#include <memory>
#include <utility>

#include "border/guarded.h"
#include "saved_tensors/keeper.h"

namespace tamp {
namespace {

// Keeps tensors as they are, and notes them.
class Noting final : public Keeper {
 public:
  explicit Noting(std::shared_ptr<tamp_recording> recording) : recording_(std::move(recording)) {}

  std::unique_ptr<Kept> keep(const at::Tensor &saved) override {
    note(saved);
    return nullptr;
  }

  bool is_exact() const override { return true; }

  void note(const at::Tensor &kept) override {
    const Unnoticed unnoticed;
    const at::Tensor dense = dense_part(kept);
    if (!dense.unsafeGetTensorImpl()->has_storage()) return;
    tamp_saved_tensor raw{};
    describe_layout(raw.tensor, dense);
    raw.tensor.elements = dense.numel();
    raw.tensor.offset = dense.storage_offset();
    raw.storage_bytes = static_cast<int64_t>(dense.storage().nbytes());
    raw.is_weight = kept.is_leaf() ? kept.requires_grad() : is_of_leaf(kept);
    raw.has_history = !kept.is_leaf() && raw.is_weight == 0;
    raw.is_activation = is_activation(kept);
    raw.is_small_part = is_small_part(kept);
    const std::lock_guard<std::mutex> lock(recording_->mutex);
    if (recording_->stopped) return;
    raw.event = saver();
    auto *memory = memory_of(*recording_, dense);
    raw.tensor.memory = memory->number;
    raw.tensor.parameter = memory->parameter_at(dense);
    recording_->saved.push_back({raw, dense.storage().getWeakStorageImpl()});
  }

 private:
  // The operator that runs. A node of this crate saves after its own operators, or after the call of a function was
  // noted: then that is the last event.
  int64_t saver() const {
    const auto open = recording_->open.find(at::RecordFunction::currentThreadId());
    const int64_t running = open == recording_->open.end() || open->second.empty() ? -1 : open->second.back();
    if (running >= 0 && recording_->events[running].raw.kind == TAMP_EVENT_OPERATOR) return running;
    return static_cast<int64_t>(recording_->events.size()) - 1;
  }

  std::shared_ptr<tamp_recording> recording_;
};

}  // namespace
}  // namespace tamp

extern "C" {

tamp_saved_tensors *tamp_recording_saves(tamp_recording *recording, char **err) noexcept {
  return tamp::guarded(err, [&] { return new tamp_saved_tensors{std::make_shared<tamp::Noting>(recording->itself)}; });
}

size_t tamp_recording_saved_count(const tamp_recording *recording) noexcept { return recording->saved.size(); }

void tamp_recording_saved(const tamp_recording *recording, size_t index, tamp_saved_tensor *out, char **err) noexcept {
  tamp::guarded(err, [&] {
    const auto &saved = recording->saved.at(index);
    *out = saved.raw;
    out->is_free = saved.held.expired() ? 1 : 0;
  });
}

}  // extern "C"
