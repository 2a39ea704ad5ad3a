// The engine that runs the backward passes of the process once saved tensors are to be kept in another way. libtorch
// asks its engine for the hooks of what it saves, and nothing else tells it.
//
// It is libtorch's own engine with one answer of its own, and takes its place when the first region opens. Passes that
// run then end in the old engine, with those that they start inside of them: the threads of an engine wake up each other.

#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "border/guarded.h"
#include "function/function_node.h"
#include "saved_tensors/keeper.h"

namespace tamp {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

#ifdef TAMP_NODE_RELEASES_RESOURCES
inline constexpr std::string_view kKeeperName = "TCH_AMP_SAVED_TENSORS";
inline const c10::DebugInfoKind kKeeper(&kKeeperName);
#else
// An arbitrary number that libtorch does not use itself.
inline constexpr auto kKeeper = static_cast<c10::DebugInfoKind>(0xa4);
#endif

// The keeper of a region. libtorch passes it on to the threads of a backward pass that is started in the region, whose
// second derivatives save tensors, too.
struct OfRegion final : c10::DebugInfoBase {
  explicit OfRegion(std::shared_ptr<Keeper> keeper) : keeper(std::move(keeper)) {}

  std::shared_ptr<Keeper> keeper;  // null: tensors are kept as they are
};

class Hooks final : public SavedVariableHooks {
 public:
  explicit Hooks(std::shared_ptr<Keeper> keeper) : keeper_(std::move(keeper)) {}

  void call_pack_hook(const at::Tensor &saved) override {
    version_ = SavedVersion(saved);
    {
      const OutsideRegions own;
      const c10::NoGradGuard no_grad;
      kept_ = std::exchange(keeper_, nullptr)->keep(saved);
    }
    if (kept_ != nullptr) return;
    // An output must not own its history, which owns this.
    as_given_ = saved.is_leaf() ? saved : saved.tensor_data();
  }

  at::Tensor call_unpack_hook() override {
    if (kept_ == nullptr) {
      version_.check();
      return as_given_;
    }
    if (!kept_->checks_version()) version_.check();
    const OutsideRegions own;
    const c10::NoGradGuard no_grad;
    return kept_->restore();
  }

 private:
  std::shared_ptr<Keeper> keeper_;
  std::unique_ptr<Kept> kept_;
  at::Tensor as_given_;
  SavedVersion version_;
};

// Keeps tensors as they are, through hooks.
class AsGiven final : public Keeper {
 public:
  std::unique_ptr<Kept> keep(const at::Tensor &) override { return nullptr; }
  bool is_exact() const override { return true; }
};

#ifdef TAMP_WITH_TESTING
// Whether the tests want hooks around everything that is saved, which must change nothing.
std::shared_ptr<Keeper> always() {
  static const char *const asked = std::getenv("TCH_AMP_SAVED_TENSORS");
  static const auto as_given =
      asked != nullptr && std::string_view(asked) == "as-given" ? std::make_shared<AsGiven>() : nullptr;
  return as_given;
}
#else
std::shared_ptr<Keeper> always() { return nullptr; }
#endif

// How many passes of this crate's engine the thread is in, one inside of the other.
thread_local int passes = 0;

// An engine beside libtorch's own.
class SecondEngine : public Engine {
 protected:
  // Starts the threads of devices and those for passes that are nested deeply. libtorch starts those of one engine in a
  // process, that of the first pass. So it starts those of its own engine here, unless it has done so before.
  void start_threads() {
    get_base_engine().initialize_device_threads_pool();
    start_device_threads();
  }
};

class KeepingEngine final : public SecondEngine {
 public:
  // Never destroyed: other threads may be in a pass while the process ends.
  static KeepingEngine &instance() {
    static auto *const engine = new KeepingEngine();
    return *engine;
  }

  void start() {
    static std::once_flag started;
    std::call_once(started, [this] { start_threads(); });
  }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto keeper = current_keeper();
    if (keeper == nullptr) return nullptr;
    return std::make_unique<Hooks>(std::move(keeper));
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list &roots,
                                         const torch::autograd::variable_list &inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list &outputs) override {
    // Inside of a pass that began before the engine was replaced.
    const bool is_of_other = passes == 0 && torch::autograd::get_current_graph_task_id() != -1;
    if (is_of_other) {
      return Engine::get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    }
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

 protected:
  // All threads of a pass are in it.
  void thread_main(const std::shared_ptr<torch::autograd::GraphTask> &task) override {
    struct Pass {
      Pass() { ++passes; }
      ~Pass() { --passes; }
    };
    const Pass pass;
    Engine::thread_main(task);
  }

 private:
  KeepingEngine() = default;
  ~KeepingEngine() override { stop(); }
};

Engine &keeping_engine() { return KeepingEngine::instance(); }

}  // namespace

std::shared_ptr<Keeper> current_keeper() {
  const auto *region = static_cast<const OfRegion *>(c10::ThreadLocalDebugInfo::get(kKeeper));
  return region == nullptr ? always() : region->keeper;
}

std::string prepare_saved_tensors() {
  static std::mutex replacing;
  const std::lock_guard<std::mutex> lock(replacing);
  const Engine &present = Engine::get_default_engine();
  if (&present == &KeepingEngine::instance()) return {};
  if (typeid(present) != typeid(Engine)) return c10::demangle(typeid(present).name());
  KeepingEngine::instance().start();
  torch::autograd::set_default_engine_stub(keeping_engine);
  return {};
}

#ifdef TAMP_WITH_TESTING
namespace {

class OtherEngine final : public SecondEngine {
 public:
  OtherEngine() { start_threads(); }
  ~OtherEngine() override { stop(); }
};

Engine &other_engine() {
  static auto *const engine = new OtherEngine();
  return *engine;
}

[[maybe_unused]] const bool has_hooks_from_the_start = always() != nullptr && prepare_saved_tensors().empty();

}  // namespace
#endif

}  // namespace tamp

struct tamp_saved_tensors_region {
  explicit tamp_saved_tensors_region(std::shared_ptr<tamp::Keeper> its)
      : keeper(its), guard(tamp::kKeeper, std::make_shared<tamp::OfRegion>(std::move(its))) {}
  tamp_saved_tensors_region(const tamp_saved_tensors_region &) = delete;
  tamp_saved_tensors_region &operator=(const tamp_saved_tensors_region &) = delete;
  ~tamp_saved_tensors_region() {
    if (keeper != nullptr) keeper->end();
  }

  std::shared_ptr<tamp::Keeper> keeper;
  // Restores what the thread had before.
  c10::DebugInfoGuard guard;
};

extern "C" {

char *tamp_saved_tensors_prepare(char **err) noexcept {
  return tamp::guarded(err, []() -> char * {
    const std::string other = tamp::prepare_saved_tensors();
    return other.empty() ? nullptr : tamp::message(other.c_str());
  });
}

tamp_saved_tensors *tamp_saved_tensors_new(uint8_t how, char **err) noexcept {
  return tamp::guarded(err, [&] {
    auto keeper = how == TAMP_SAVED_HALF       ? tamp::keeper_in_half()
                  : how == TAMP_SAVED_FP8_ROWS ? tamp::keeper_in_fp8_rows()
                  : how == TAMP_SAVED_ON_HOST  ? tamp::keeper_on_host()
                                               : std::make_shared<tamp::AsGiven>();
    return new tamp_saved_tensors{std::move(keeper)};
  });
}

tamp_saved_tensors *tamp_saved_tensors_current(char **err) noexcept {
  return tamp::guarded(err, []() -> tamp_saved_tensors * {
    auto keeper = tamp::current_keeper();
    return keeper == nullptr ? nullptr : new tamp_saved_tensors{std::move(keeper)};
  });
}

void tamp_saved_tensors_free(tamp_saved_tensors *saved) noexcept { delete saved; }

uint8_t tamp_saved_tensors_is_exact(const tamp_saved_tensors *saved) noexcept { return saved->keeper->is_exact(); }

tamp_saved_tensors_region *tamp_saved_tensors_enter(const tamp_saved_tensors *saved, char **err) noexcept {
  return tamp::guarded(err, [&] { return new tamp_saved_tensors_region(saved == nullptr ? nullptr : saved->keeper); });
}

void tamp_saved_tensors_leave(tamp_saved_tensors_region *region) noexcept { delete region; }

#ifdef TAMP_WITH_TESTING
void tamp_testing_engine(uint8_t kind) noexcept {
  using torch::autograd::Engine;
  torch::autograd::set_default_engine_stub(kind == TAMP_TESTING_ENGINE_OF_OTHERS ? tamp::other_engine
                                                                                 : Engine::get_base_engine);
}
#endif

}  // extern "C"
