// Parts of a model that keep none of the tensors that autograd saves in them. When a backward pass first asks for one
// of them, the part runs again and all are collected, each from the same place in the order of saves. The graph of the
// first run is the one that is differentiated; that of the second is dropped.

#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "border/deferred_destruction.h"
#include "border/guarded.h"
#include "saved_tensors/keeper.h"

#ifdef TAMP_WITH_INSIGHT
#include "insight/recording.h"
#endif

namespace tamp {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;

constexpr const char *kSame = "; the closure must compute the same both times";

// What a saved tensor must have in common in both runs.
struct Description {
  explicit Description(const Tensor &t) : dtype(t.scalar_type()), device(t.device()) {
    if (!t.is_nested()) sizes = t.sizes();
  }

  bool operator==(const Description &other) const {
    return dtype == other.dtype && device == other.device && sizes == other.sizes;
  }

  std::string text() const { return c10::str(dtype, " ", c10::IntArrayRef(sizes), " on ", device); }

  at::ScalarType dtype;
  at::Device device;
  c10::DimVector sizes;
};

// A tensor that was saved in the first run.
struct Saved {
  explicit Saved(const Tensor &t) : description(t), version(t) {}

  Description description;
  SavedVersion version;
  bool is_needed = true;  // until the node is gone that saved it
};

// Keeps tensors as they are, and collects those of a second run.
class Collecting final : public Keeper {
 public:
  explicit Collecting(std::vector<Saved> first) : first_(std::move(first)), tensors_(first_.size()) {}

  std::unique_ptr<Kept> keep(const Tensor &saved) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t place = count_++;
    if (place >= first_.size()) return nullptr;
    const auto &[before, version, is_needed] = first_[place];
    const Description now(saved);
    if (now == before) {
      // Without its history, which only the first run's graph needs.
      if (is_needed) tensors_[place] = saved.tensor_data();
    } else if (difference_.empty()) {
      difference_ = c10::str("saved tensor ", place, " of the second run is ", now.text(),
                             ", and that of the first was ", before.text(), kSame);
    }
    return nullptr;
  }

  bool is_exact() const override { return true; }

  // Returns the tensors. Throws if they are not those of the first run.
  std::vector<Tensor> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(difference_.empty(), difference_);
    TORCH_CHECK(count_ == first_.size(), "the second run saved ", count_,
                " tensors for the backward pass, and the first ", first_.size(), kSame);
    return std::move(tensors_);
  }

 private:
  const std::vector<Saved> first_;
  std::mutex mutex_;
  std::vector<Tensor> tensors_;
  size_t count_ = 0;
  std::string difference_;  // the first one
};

// A part, as its first run and the tensors that were saved in it share it.
class Part final : public Keeper, public std::enable_shared_from_this<Part> {
 public:
  // Owns the state from the beginning.
  Part(Owned state, tamp_run_again run) : state_(std::move(state)), run_(run), around_(current_keeper()) {}
  ~Part() override { destroy({std::move(state_), {nullptr, nullptr}, std::move(inputs_)}); }

  void save(tamp_tensor *const *inputs, size_t count) {
    inputs_.reserve(count);
    for (size_t i = 0; i < count; ++i) inputs_.emplace_back(tensor(inputs[i]), /*is_output=*/false);
  }

  std::unique_ptr<Kept> keep(const Tensor &saved) override {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto kept = std::make_unique<Forgotten>(shared_from_this(), first_.size());
    first_.emplace_back(saved);
    collected_.push_back(saved.tensor_data());
    return kept;
  }

  // A node of this crate that keeps a tensor by itself does so in a part as well.
  void note(const Tensor &kept) override {
    if (around_ != nullptr) around_->note(kept);
  }

  bool is_exact() const override { return true; }

  void end() noexcept override {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    is_first_ = false;
    collected_.clear();
  }

 private:
  // A saved tensor, of which only the place in the order of saved tensors is kept.
  struct Forgotten final : Kept {
    Forgotten(std::shared_ptr<Part> part, size_t place) : part(std::move(part)), place(place) {}
    ~Forgotten() override { part->forget(place); }

    Tensor restore() override { return part->at(place); }
    bool checks_version() const override { return true; }

    std::shared_ptr<Part> part;
    size_t place;
  };

  void forget(size_t place) noexcept {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (place < first_.size()) first_[place].is_needed = false;
    if (place < collected_.size()) collected_[place].reset();
  }

  // Returns a tensor once: most are asked for once in a pass, and their memory is free after that. During the first run
  // a pass may ask for any as often as it likes.
  Tensor at(size_t place) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (is_first_) {
      first_.at(place).version.check();
      return collected_.at(place);
    }
    TORCH_CHECK(!is_running_,
                "checkpointed: the closure differentiates an output of its own part; do that outside of the closure");
    const auto pass = torch::autograd::get_current_graph_task_id();
    if (pass != pass_ || place >= collected_.size() || !collected_[place].defined()) run_again(pass);
    return std::exchange(collected_.at(place), Tensor());
  }

  // What a pass has not asked for is not kept for longer than the pass.
  void end_pass(int pass) noexcept {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (pass == pass_) collected_.clear();
  }

  void run_again(int pass) {
    collected_.clear();
    // Here alone, since the second run may change some of them as the first did.
    for (const auto &saved : first_) {
      if (saved.is_needed) saved.version.check();
    }
    collected_ = collect();
    for (auto &saved : first_) saved.version.renew();
    pass_ = pass;
    if (pass == -1) return;
    torch::autograd::Engine::get_default_engine().queue_callback([part = weak_from_this(), pass] {
      if (const auto alive = part.lock()) alive->end_pass(pass);
    });
  }

  // Runs again, and returns the tensors that are saved and still needed.
  std::vector<Tensor> collect() {
    is_running_ = true;
    const auto ended = c10::make_scope_exit([&] { is_running_ = false; });
    std::vector<Tensor> inputs;
    std::vector<tamp_tensor *> pointers;
    inputs.reserve(inputs_.size());
    for (const auto &input : inputs_) {
      // Fails if the tensor was changed in place.
      inputs.push_back(input.unpack());
      pointers.push_back(reinterpret_cast<tamp_tensor *>(&inputs.back()));
    }
    const auto collecting = std::make_shared<Collecting>(first_);
    const tamp_saved_tensors how{collecting};
    char *error = nullptr;
    {
      const InsideRegions programs;
      run_(state_.get(), pointers.data(), pointers.size(), &how, &error);
    }
    if (error != nullptr) {
      const std::string text(error);
      tamp_string_free(error);
      TORCH_CHECK(false, "checkpointed: ", text);
    }
    return collecting->take();
  }

  std::recursive_mutex mutex_;
  Owned state_;
  tamp_run_again run_;
  std::vector<SavedVariable> inputs_;
  std::shared_ptr<Keeper> around_;
  std::vector<Saved> first_;
  std::vector<Tensor> collected_;  // those of the first run until it ends; then what is left of the last one for a pass
  int pass_ = -1;
  bool is_first_ = true, is_running_ = false;
};

}  // namespace
}  // namespace tamp

extern "C" {

tamp_saved_tensors *tamp_saved_tensors_recomputed(tamp_tensor *const *inputs, size_t count, void *state,
                                                  tamp_run_again run, tamp_function_free drop, char **err) noexcept {
  tamp::Owned owned(state, drop);
  return tamp::guarded(err, [&]() -> tamp_saved_tensors * {
    if (!at::GradMode::is_enabled()) return nullptr;
#ifdef TAMP_WITH_INSIGHT
    // Reports name the inputs by this function.
    tamp::note_function("checkpointed", 0, static_cast<uint64_t>(-1));
#endif
    auto part = std::make_shared<tamp::Part>(std::move(owned), run);
    part->save(inputs, count);
    return new tamp_saved_tensors{std::move(part)};
  });
}

}  // extern "C"
