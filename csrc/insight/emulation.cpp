// Half precision emulated in f32: what a region would compute in half precision is computed in f32 and rounded at random
// to one of the two neighbouring half-precision numbers. Such runs show how far rounding alone moves a result, and one
// that does all of this but rounds nothing shows what else is in them.
//
// Two dispatch keys that libtorch keeps for extensions and tests have kernels here while a thread emulates. One comes
// before all others and, like autocast, sees the operators that the program calls: autocast's lists decide there which of
// them would be in half precision. The other comes after autograd, where operators run: its kernel rounds what they read
// and what they return. What this crate computes itself is not emulated: see border/regions.h.
//
// Tensors that half precision would hold in half precision are marked, by their storage. An operator on no list returns
// half precision if all tensors that it reads are marked, and the gradient of a marked tensor is rounded, whichever
// operator it comes from.

// Before all others, so that record_function.h is included as in a release build, like that of libtorch.
#include "insight/recorder.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "autocast/overrides.h"
#include "border/guarded.h"

namespace tamp {
namespace {

using at::Tensor;
using c10::IValue;

// How operators are emulated.
enum class Mode {
  kInherit,  // as their inputs say
  kHalf,     // inputs are cast, and results rounded
  kF32,      // neither
  kOff       // not at all, marks included
};

// The mode that an enclosing operator has decided.
thread_local Mode decided = Mode::kInherit;

class Deciding {
 public:
  explicit Deciding(Mode mode) : outer_(std::exchange(decided, mode)) {}
  Deciding(const Deciding &) = delete;
  Deciding &operator=(const Deciding &) = delete;
  ~Deciding() { decided = outer_; }

 private:
  Mode outer_;
};

// The thread and the sequence number of a backward node.
using NodeNumber = std::pair<uint64_t, uint64_t>;

NodeNumber number_of(const torch::autograd::Node &node) { return {node.thread_id(), node.sequence_nr()}; }

// The number of emulations in the process. While it is zero, a region that opens does not look for one of its thread.
std::atomic<int> emulations{0};

// What a thread and the threads of its backward passes emulate.
class Emulation : public c10::DebugInfoBase, public std::enable_shared_from_this<Emulation> {
 public:
  explicit Emulation(const tamp_emulated &how)
      : regions(how.regions),
        rounding(how.rounding),
        dtype(static_cast<at::ScalarType>(how.dtype)),
        device(static_cast<c10::DeviceType>(how.device_type)),
        lower_(how.lower, how.lower + how.lower_count),
        f32_(how.f32, how.f32 + how.f32_count),
        seed_(how.seed) {
    ++emulations;
  }
  Emulation(const Emulation &) = delete;
  Emulation &operator=(const Emulation &) = delete;
  ~Emulation() override { --emulations; }

  bool rounds() const { return regions == TAMP_REGIONS_EMULATED; }

  const uint8_t regions;
  const uint8_t rounding;
  const at::ScalarType dtype;
  const c10::DeviceType device;

  // The mode that autocast's lists give an operator, by its name without overload.
  Mode listed(const std::string &name) const {
    return lower_.count(name) != 0 ? Mode::kHalf : f32_.count(name) != 0 ? Mode::kF32 : Mode::kInherit;
  }

  bool is_marked(const Tensor &t) {
    const auto *impl = storage(t);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = memory_.find(impl);
    return found != memory_.end() && found->second.marked;
  }

  void mark(const Tensor &t) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto *memory = memory_of(t)) memory->marked = true;
  }

  // The key of the thresholds for a cast: the same for every view of a tensor that has not changed.
  uint64_t key_of_cast(const Tensor &t) {
    const uint64_t version = t.is_inference() ? 0 : t._version();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto *memory = memory_of(t);
    return mixed(seed_ ^ mixed((memory == nullptr ? 0 : 2 * memory->number) ^ mixed(version)));
  }

  uint64_t next_key() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return mixed(seed_ ^ mixed(2 * ++results_ + 1));
  }

  void note_node(const torch::autograd::Node &node, Mode mode) {
    const std::lock_guard<std::mutex> lock(mutex_);
    nodes_.insert_or_assign(number_of(node), mode);
  }

  Mode mode_of(const torch::autograd::Node &node) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = nodes_.find(number_of(node));
    return found == nodes_.end() ? Mode::kInherit : found->second;
  }

  void note_dtype(at::ScalarType returned) {
    const std::lock_guard<std::mutex> lock(mutex_);
    returned_ |= returned == at::kBFloat16 ? TAMP_RETURNED_BFLOAT16 : returned == at::kHalf ? TAMP_RETURNED_HALF : 0;
  }

  uint8_t returned() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return returned_;
  }

 private:
  // Held weakly: the data is freed as usual, but no storage's address is used again.
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> held;
    uint64_t number;
    bool marked;
  };

  static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  Memory *memory_of(const Tensor &t) {
    const auto *impl = storage(t);
    if (impl == nullptr) return nullptr;
    const auto found = memory_.find(impl);
    if (found != memory_.end()) return &found->second;
    auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(t.storage().unsafeGetStorageImpl());
    Memory entry{c10::weak_intrusive_ptr<c10::StorageImpl>(strong), memory_.size(), false};
    return &memory_.emplace(impl, std::move(entry)).first->second;
  }

  std::mutex mutex_;
  const std::unordered_set<std::string> lower_, f32_;
  const uint64_t seed_;
  uint64_t results_ = 0;
  uint8_t returned_ = 0;
  std::unordered_map<const c10::StorageImpl *, Memory> memory_;
  std::map<NodeNumber, Mode> nodes_;
};

// libtorch hands this information on to the threads of a backward pass.
c10::DebugInfoKind info() { return c10::DebugInfoKind::TEST_INFO; }

Emulation *current() { return static_cast<Emulation *>(c10::ThreadLocalDebugInfo::get(info())); }

// ----------------------------------------------------------------------------------------------------- insight/numbers

bool is_rounded(const Tensor &t) {
  return t.defined() && t.scalar_type() == at::kFloat && t.layout() == at::kStrided && storage(t) != nullptr;
}

// How many bits rounding removes.
int64_t spare_bits(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 16 : 13; }

void fold(const Tensor &x, int64_t by) {
  x.bitwise_xor_(x.bitwise_right_shift(by).bitwise_and_((int64_t{1} << (32 - by)) - 1));
}

// A random threshold of `bits` bits for each cell, an interval between two neighbours: all numbers in it share one, as
// they share the middle in rounding to nearest. The mixing is MurmurHash3's.
Tensor thresholds(const Tensor &cells, uint64_t key, int64_t bits) {
  const auto constant = [](uint32_t x) { return static_cast<int64_t>(static_cast<int32_t>(x)); };
  const Tensor x = cells.bitwise_xor(constant(static_cast<uint32_t>(key)));
  fold(x, 16);
  x.mul_(constant(0x85ebca6bU)).add_(constant(static_cast<uint32_t>(key >> 32)));
  fold(x, 13);
  x.mul_(constant(0xc2b2ae35U));
  return x.bitwise_right_shift_(32 - bits).bitwise_and_((int64_t{1} << bits) - 1);
}

// Rounds f32 numbers at random to a neighbour in the dtype of an emulation, without bias. Numbers of the dtype stay.
Tensor rounded(const Emulation &emulation, const Tensor &x, uint64_t key) {
  const int64_t spare = spare_bits(emulation.dtype);
  const Tensor bits = x.view(at::kInt);
  Tensor sum = thresholds(bits.bitwise_right_shift(spare), key, spare);
  sum.add_(bits).bitwise_and_(-(int64_t{1} << spare));
  Tensor y = sum.view(at::kFloat);
  if (emulation.dtype == at::kHalf && emulation.rounding == TAMP_ROUNDING_RANDOM) {
    // Subnormal numbers are 2^-24 apart.
    const Tensor scaled = x * 0x1p24;
    const Tensor cells = scaled.floor().clamp(-2048, 2048).to(at::kInt);
    const Tensor small = (scaled + thresholds(cells, key, spare) / 0x1p13).floor_().mul_(0x1p-24);
    y = at::where(x.abs() < 0x1p-14, small, y);
    y = at::where(y.abs() > 65504, x.sign() * std::numeric_limits<double>::infinity(), y);
  }
  return at::where(x.isfinite(), y, x);
}

Tensor cast(Emulation &emulation, const Tensor &t) {
  const bool stays = emulation.rounding == TAMP_ROUNDING_NONE || emulation.is_marked(t);
  if (!is_rounded(t) || t.numel() == 0 || stays) return t;
  return rounded(emulation, t, emulation.key_of_cast(t));
}

void round(Emulation &emulation, const Tensor &t) {
  if (t.numel() > 0 && emulation.rounding != TAMP_ROUNDING_NONE) {
    t.copy_(rounded(emulation, t, emulation.next_key()));
  }
  emulation.mark(t);
}

// ------------------------------------------------------------------------------------------------ operators as they run

// Normalizations take statistics and parameters in f32 beside an input in half precision, and only their first result
// has the dtype of the input.
bool follows_first(std::string_view name) {
  static const std::unordered_set<std::string_view> following = {
      "aten::native_layer_norm",          "aten::native_layer_norm_backward",
      "aten::native_batch_norm",          "aten::native_batch_norm_backward",
      "aten::_native_batch_norm_legit",   "aten::_batch_norm_with_update",
      "aten::batch_norm_backward",        "aten::cudnn_batch_norm",
      "aten::cudnn_batch_norm_backward",  "aten::native_group_norm",
      "aten::native_group_norm_backward", "aten::_fused_rms_norm",
      "aten::_fused_rms_norm_backward",   "aten::native_dropout",
      "aten::native_dropout_backward"};
  return following.count(name) != 0;
}

// Whether the second result of an operator, and what follows, is in f32 even beside half precision.
bool returns_statistics(std::string_view name) {
  constexpr std::string_view attention = "aten::_scaled_dot_product_";
  return name.substr(0, attention.size()) == attention && name.find("_backward") == std::string_view::npos;
}

// Whether an operator only returns views, whose numbers are those of its inputs.
bool is_view(const c10::FunctionSchema &schema) {
  const auto is_alias = [](const c10::Argument &returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  };
  return !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(), is_alias);
}

// How an operator uses the arguments that it was given.
struct Call {
  Call(const c10::OperatorHandle &op, const torch::jit::Stack &stack)
      : op(op), name(op.operator_name().name), arguments(stack.end() - op.schema().arguments().size(), stack.end()) {}

  bool writes(size_t argument) const {
    const auto *alias = op.schema().arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }
  // The first argument that it changes, or null.
  const Tensor *changed() const {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (writes(i) && !op.schema().arguments()[i].is_out() && arguments[i].isTensor()) return &arguments[i].toTensor();
    }
    return nullptr;
  }
  bool shares_memory(const Tensor &t) const {
    bool found = false;
    for (const IValue &value : arguments) {
      for_each_tensor(value, [&](const Tensor &argument) { found |= storage(argument) == storage(t); });
    }
    return found;
  }

  const c10::OperatorHandle &op;
  const std::string &name;
  const std::vector<IValue> arguments;  // held, so that no result has the address of one
};

// Whether an operator on no list returns half precision: if all floating tensors that it reads are in it. Those without
// dimensions count only if all are, as in the promotion of dtypes.
bool inherits(Emulation &emulation, const Call &call) {
  if (const Tensor *changed = call.changed()) return emulation.is_marked(*changed);
  c10::SmallVector<const Tensor *, 8> read;
  bool sized = false;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (call.writes(i)) continue;
    for_each_tensor(call.arguments[i], [&](const Tensor &t) {
      if (!at::isFloatingType(t.scalar_type())) return;
      read.push_back(&t);
      sized |= t.dim() > 0;
    });
  }
  if (sized) {
    const auto none = [](const Tensor *t) { return t->dim() == 0; };
    read.erase(std::remove_if(read.begin(), read.end(), none), read.end());
  }
  if (follows_first(call.name) && !read.empty()) read.resize(1);
  const auto marked = [&](const Tensor *t) { return is_rounded(*t) && emulation.is_marked(*t); };
  return !read.empty() && std::all_of(read.begin(), read.end(), marked);
}

IValue cast_all(Emulation &emulation, const IValue &value) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(cast(emulation, value.toTensor())) : value;
  if (value.isTensorList()) {
    auto list = value.toTensorList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, cast(emulation, list.get(i)));
    return list;
  }
  return value;
}

// Casts what an operator reads in half precision.
void cast_arguments(Emulation &emulation, const Call &call, IValue *arguments) {
  const auto &schema = call.op.schema().arguments();
  const size_t end = follows_first(call.name) ? std::min<size_t>(1, schema.size()) : schema.size();
  for (size_t i = 0; i < end; ++i) {
    if (call.writes(i) || schema[i].name() == "logsumexp") continue;
    arguments[i] = cast_all(emulation, arguments[i]);
  }
}

void round_results(Emulation &emulation, const Call &call, c10::ArrayRef<IValue> results) {
  const bool first_alone = follows_first(call.name) || returns_statistics(call.name);
  const Tensor *changed = call.changed();
  for (size_t i = 0; i < (first_alone ? std::min<size_t>(1, results.size()) : results.size()); ++i) {
    for_each_tensor(results[i], [&](const Tensor &t) {
      if (!is_rounded(t)) return;
      const bool is_changed = changed != nullptr && storage(*changed) == storage(t);
      if (is_changed ? emulation.is_marked(t) : !call.shares_memory(t)) round(emulation, t);
    });
  }
}

void note_dtypes(Emulation &emulation, const Call &call, c10::ArrayRef<IValue> results) {
  for (const IValue &result : results) {
    for_each_tensor(result, [&](const Tensor &t) {
      if (at::isReducedFloatingType(t.scalar_type()) && !call.shares_memory(t)) emulation.note_dtype(t.scalar_type());
    });
  }
}

// The mode of the backward node that runs on the calling thread, or nothing in a forward pass.
std::optional<Mode> mode_of_backward(Emulation &emulation) {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return std::nullopt;
  // It adds to the gradient of a parameter, which has the parameter's dtype.
  const bool accumulates = node->sequence_nr() == std::numeric_limits<uint64_t>::max();
  return accumulates ? Mode::kOff : emulation.mode_of(*node);
}

// The kernel after autograd.
void run(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kEmulatedRuns);
  auto *const emulation = current();
  const c10::impl::ExcludeDispatchKeyGuard within(kEmulation);
  if (emulation == nullptr || is_view(op.schema())) return op.redispatchBoxed(below, stack);
  const Call call(op, *stack);
  const auto results = [&] {
    const size_t count = op.schema().returns().size();
    return c10::ArrayRef<IValue>(stack->data() + (stack->size() - count), count);
  };
  if (!emulation->rounds()) {
    op.redispatchBoxed(below, stack);
    return note_dtypes(*emulation, call, results());
  }
  const Mode mode = decided != Mode::kInherit ? decided : mode_of_backward(*emulation).value_or(Mode::kInherit);
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const bool half = mode == Mode::kHalf || (mode == Mode::kInherit && inherits(*emulation, call));
  if (mode == Mode::kHalf) {
    const Unnoticed own;
    cast_arguments(*emulation, call, stack->data() + (stack->size() - call.arguments.size()));
  }
  op.redispatchBoxed(below, stack);
  const Unnoticed own;
  if (half) round_results(*emulation, call, results());
  note_dtypes(*emulation, call, results());
}

// ------------------------------------------------------------------------------------- operators as the program calls them

bool is_region_open(const Emulation &emulation) {
  return at::autocast::is_autocast_enabled(emulation.device) &&
         at::autocast::get_autocast_dtype(emulation.device) == at::kFloat;
}

bool requires_grad(c10::ArrayRef<IValue> arguments) {
  bool found = false;
  for (const IValue &argument : arguments) {
    for_each_tensor(argument, [&](const Tensor &t) { found |= t.requires_grad(); });
  }
  return found;
}

// The argument by which a call asks for the dtype of its result, or null.
IValue *asked_dtype(const c10::OperatorHandle &op, IValue *arguments) {
  const auto &schema = op.schema().arguments();
  for (size_t i = 0; i < schema.size(); ++i) {
    if (schema[i].name() == "dtype" && arguments[i].isInt()) return &arguments[i];
  }
  return nullptr;
}

// The mode in which an operator that the program calls is emulated. If it asks for the emulated dtype, that becomes f32.
Mode decide(Emulation &emulation, const c10::OperatorHandle &op, IValue *arguments, size_t count) {
  if (decided != Mode::kInherit) return decided;
  const bool open = is_region_open(emulation);
  const auto backward = mode_of_backward(emulation);
  const c10::ArrayRef<IValue> given(arguments, count);
  if (backward && *backward != Mode::kInherit) return *backward;
  IValue *const asked = asked_dtype(op, arguments);
  if (asked != nullptr && asked->toInt() == static_cast<int64_t>(emulation.dtype)) {
    *asked = IValue(static_cast<int64_t>(at::kFloat));
    return Mode::kHalf;
  }
  // An optimizer's step with marked gradients, for instance, is not emulated. The engine adds up gradients outside of
  // nodes.
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!in_backward && !open && !(c10::GradMode::is_enabled() && requires_grad(given))) return Mode::kOff;
  if (open) {
    if (const auto how = overridden(op, given)) return *how == TAMP_RUN_F32 ? Mode::kF32 : Mode::kHalf;
    const Mode listed = emulation.listed(op.operator_name().name);
    if (listed != Mode::kInherit) return listed;
  }
  return asked != nullptr && asked->toInt() == static_cast<int64_t>(at::kFloat) ? Mode::kF32 : Mode::kInherit;
}

// Whether an operator converts its first argument.
bool converts(const std::string &name) {
  return name == "aten::to" || name == "aten::_to_copy" || name == "aten::type_as";
}

// A copy in place of a conversion that half precision would make and f32 skips, marked if it is to half precision;
// nothing if there is no such conversion.
std::optional<Tensor> converted(Emulation &emulation, const c10::OperatorHandle &op, Mode mode, const IValue *arguments,
                                size_t count) {
  if (!converts(op.operator_name().name) || count == 0 || !arguments[0].isTensor()) return std::nullopt;
  const Tensor &self = arguments[0].toTensor();
  if (!is_rounded(self)) return std::nullopt;
  if (count > 1 && arguments[1].isTensor()) {
    const Tensor &other = arguments[1].toTensor();
    if (!is_rounded(other)) return std::nullopt;
    mode = emulation.is_marked(other) ? Mode::kHalf : Mode::kF32;
  }
  if ((mode != Mode::kHalf && mode != Mode::kF32) || (mode == Mode::kHalf) == emulation.is_marked(self)) {
    return std::nullopt;
  }
  const Deciding deciding(mode);
  return self.clone();
}

// Rounds the gradient of a result that is marked, whichever operator it comes from.
void round_gradient(Emulation &emulation, const Tensor &result) {
  const std::weak_ptr<Emulation> weak = emulation.weak_from_this();
  result.register_hook([weak](const Tensor &gradient) -> Tensor {
    const auto emulation = weak.lock();
    if (emulation == nullptr || !is_rounded(gradient)) return gradient;
    if (emulation->rounding == TAMP_ROUNDING_NONE) {
      emulation->mark(gradient);
      return gradient;
    }
    Tensor half;
    {
      const Unnoticed own;
      half = rounded(*emulation, gradient, emulation->next_key());
    }
    if (c10::GradMode::is_enabled() && gradient.requires_grad()) {
      const OutsideRegions own;
      half = gradient + (half - gradient.detach());
    }
    emulation->mark(half);
    return half;
  });
}

// Remembers how the nodes of results were made, and rounds the gradients of those that are marked.
void follow_results(Emulation &emulation, const c10::OperatorHandle &op, Mode mode, c10::ArrayRef<IValue> results) {
  const bool only_runs_others = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  for (const IValue &result : results) {
    for_each_tensor(result, [&](const Tensor &t) {
      if (!t.requires_grad() || t.grad_fn() == nullptr) return;
      if (mode == Mode::kHalf || mode == Mode::kF32) emulation.note_node(*t.grad_fn(), mode);
      if (!only_runs_others && is_rounded(t) && emulation.is_marked(t)) round_gradient(emulation, t);
    });
  }
}

// The kernel before all others.
void call(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kEmulatedCalls);
  auto *const emulation = current();
  if (emulation == nullptr) return op.redispatchBoxed(below, stack);
  const size_t count = op.schema().arguments().size();
  IValue *arguments = stack->data() + (stack->size() - count);
  const bool outermost = decided == Mode::kInherit;
  const Mode mode = decide(*emulation, op, arguments, count);
  if (outermost && mode != Mode::kOff) {
    if (auto copy = converted(*emulation, op, mode, arguments, count)) {
      torch::jit::drop(*stack, count);
      return torch::jit::push(*stack, std::move(*copy));
    }
  }
  const Deciding deciding(mode);
  op.redispatchBoxed(below, stack);
  if (mode == Mode::kOff) return;
  const size_t returned = op.schema().returns().size();
  follow_results(*emulation, op, mode, c10::ArrayRef<IValue>(stack->data() + (stack->size() - returned), returned));
}

// Never freed: a thread may outlive the statics of this file.
struct Kernels {
  Kernels() {
    calls.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
    runs.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
  }

  torch::Library calls{torch::Library::IMPL, "_", kEmulatedCalls, __FILE__, __LINE__};
  torch::Library runs{torch::Library::IMPL, "_", kEmulatedRuns, __FILE__, __LINE__};
};

// Registers the kernels at the first call.
const Kernels &kernels() {
  static const auto *const kernels = new Kernels();
  return *kernels;
}

void include_keys(bool calls, bool runs) {
  c10::impl::tls_set_dispatch_key_included(kEmulatedCalls, calls);
  c10::impl::tls_set_dispatch_key_included(kEmulatedRuns, runs);
}

}  // namespace
}  // namespace tamp

struct tamp_emulation {
  explicit tamp_emulation(const tamp_emulated &how) : shared(std::make_shared<tamp::Emulation>(how)) {}

  const tamp::Kernels &kernels = tamp::kernels();
  const std::shared_ptr<tamp::Emulation> shared;
};

extern "C" {

tamp_emulation *tamp_emulation_begin(const tamp_emulated *how, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_emulation * {
    TORCH_CHECK(tamp::current() == nullptr, "this thread emulates half precision already");
    auto begun = std::make_unique<tamp_emulation>(*how);
    c10::ThreadLocalDebugInfo::_push(tamp::info(), begun->shared);
    tamp::include_keys(begun->shared->rounds(), true);
    return begun.release();
  });
}

void tamp_emulation_mark(tamp_emulation *emulation, tamp_tensor *const *tensors, size_t count, char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) emulation->shared->mark(tamp::tensor(tensors[i]));
  });
}

uint8_t tamp_emulation_regions() noexcept {
  const auto *emulation = tamp::emulations == 0 ? nullptr : tamp::current();
  return emulation == nullptr ? uint8_t{TAMP_REGIONS_AS_GIVEN} : emulation->regions;
}

uint8_t tamp_emulation_returned(const tamp_emulation *emulation) noexcept { return emulation->shared->returned(); }

void tamp_emulation_end(tamp_emulation *emulation) noexcept {
  const std::unique_ptr<tamp_emulation> ended(emulation);
  char *err = nullptr;
  tamp::contained(&err, [] {
    tamp::include_keys(false, false);
    c10::ThreadLocalDebugInfo::_pop(tamp::info());
  });
  free(err);
}

}  // extern "C"
