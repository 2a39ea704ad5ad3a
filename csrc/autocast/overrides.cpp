// Overrides of autocast's lists. libtorch's lists are kernels that all threads share, so a region that overrides them
// switches on another dispatch key on its thread, which comes before autocast's. Operators that some region overrides
// have a kernel there, which casts their inputs and runs them without autocast, or passes them on if the thread's region
// does not override them; libtorch skips the key for all others, so that they cost what they cost in any region. Rules
// say which calls of an operator are overridden, and how; they are made once, and looking for one allocates nothing.
//
// What this crate computes itself is outside of all regions: see border/regions.h.

#include "autocast/overrides.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autocast/attention.h"
#include "autocast/sizes.h"
#include "autocast/statistics.h"
#include "border/guarded.h"

namespace tamp {
namespace {

using c10::IValue;

// How an operator is overridden where its size is in a range.
struct Rule {
  uint64_t at_least, below, most_bytes;
  uint8_t run_as;

  bool is_for_all() const { return at_least == 0 && below == std::numeric_limits<uint64_t>::max(); }
};

// How an operator is overridden.
struct Override {
  std::vector<Rule> rules;  // of which the last that applies counts
  Measure measure;
  bool normalizes;  // whether it writes running statistics
  bool casts_back;  // whether autocast or another rule could cast what its backward computes

  // The rule for a call, or null.
  const Rule *find(c10::ArrayRef<IValue> arguments) const;
};

const Rule *Override::find(c10::ArrayRef<IValue> arguments) const {
  std::optional<uint64_t> size;
  const auto is_in_range = [&](const Rule &rule) {
    if (rule.is_for_all()) return true;
    if (!size) size = size_of(measure, arguments);
    return rule.at_least <= *size && *size < rule.below;
  };
  for (auto rule = rules.rbegin(); rule != rules.rend(); ++rule) {
    if (!is_in_range(*rule)) continue;
    if (rule->run_as != TAMP_RUN_COMPOSED || can_be_composed(arguments, rule->most_bytes)) return &*rule;
  }
  return nullptr;
}

// The names of operators with their overloads.
using Overrides = std::unordered_map<c10::OperatorName, Override>;

thread_local uint32_t current = 0;
thread_local const Overrides *overrides = nullptr;

template <typename F>
void for_each_tensor_device(const IValue &value, const F &f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor().device().type());
  } else if (value.isList()) {
    for (const IValue &element : value.toListRef()) for_each_tensor_device(element, f);
  }
}

// Whether autocast is on for a device type: within an operator that it has cast, it is off. The key set of the operator
// does not tell, because it lacks autocast's key for operators that are on none of the lists.
bool is_on(c10::DeviceType type) {
  return at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
}

// The device type among the arguments for which autocast is on, or nothing.
std::optional<c10::DeviceType> autocast_device(c10::ArrayRef<IValue> arguments) {
  std::optional<c10::DeviceType> found;
  for (const IValue &argument : arguments) {
    for_each_tensor_device(argument, [&](c10::DeviceType type) {
      if (!found && is_on(type)) found = type;
    });
  }
  return found;
}

IValue cast(const IValue &value, at::ScalarType dtype, c10::DeviceType device) {
  if (value.isTensor()) return at::autocast::cached_cast(dtype, value.toTensor(), device);
  if (value.isTensorList()) {
    const auto list = value.toTensorVector();
    // Of the overloads of cached_cast, that for a vector would return it as it is.
    return at::autocast::cached_cast(dtype, at::TensorList(list), device);
  }
  if (value.isOptionalTensorList()) {
    auto list = value.toOptionalTensorList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::optional<at::Tensor> element = list.get(i);
      if (element) list.set(i, at::autocast::cached_cast(dtype, *element, device));
    }
    return list;
  }
  return value;
}

// Statistics and copies of them in f32, which are written back.
using Statistics = c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2>;

// Casts the arguments of a normalization. Its statistics stay in their own dtype unless the computation is in f32: in
// half precision they would stop moving. libtorch's kernels take a half-precision input beside parameters and
// statistics in f32, and so the input alone is cast to half precision.
Statistics cast_normalization(const c10::FunctionSchema &schema, IValue *values, bool f32, at::ScalarType dtype,
                              c10::DeviceType device) {
  Statistics copied;
  const auto &arguments = schema.arguments();
  const bool is_read = is_evaluated(schema, c10::ArrayRef<IValue>(values, arguments.size()));
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!f32 && i > 0) break;
    IValue next = cast(values[i], dtype, device);
    if (is_statistic(arguments[i]) && !is_read && next.isTensor() && !next.toTensor().is_same(values[i].toTensor())) {
      copied.emplace_back(values[i].toTensor(), next.toTensor());
    }
    values[i] = std::move(next);
  }
  return copied;
}

void write_back(const Statistics &copied) {
  if (copied.empty()) return;
  const OutsideRegions own;
  const c10::NoGradGuard no_grad;
  for (const auto &[statistic, copy] : copied) statistic.copy_(copy);
}

using torch::autograd::Node;
using torch::autograd::variable_list;

// The sequence number of the calling thread when it began to run a node without autocast.
thread_local uint64_t node_began = 0;

void run_without_autocast(const at::Tensor &t, uint64_t since);

// Switches autocast off for a node. The engine gives each node the state of the thread that began the backward pass, so
// that the next one has that again.
class BeforeNode final : public torch::autograd::FunctionPreHook {
 public:
  variable_list operator()(const variable_list &grads) override {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    set_excluded(local, local.excluded_ | c10::autocast_dispatch_keyset);
    node_began = at::sequence_number::peek();
    return grads;
  }
};

// Lets the nodes that a node has recorded for second derivatives run without autocast, too.
class AfterNode final : public torch::autograd::FunctionPostHook {
 public:
  variable_list operator()(const variable_list &outputs, const variable_list &) override {
    for (const auto &t : outputs) run_without_autocast(t, node_began);
    return outputs;
  }
};

// Whether a node runs without autocast already.
bool is_marked(Node &node) {
  const auto &hooks = node.pre_hooks();
  const auto is_ours = [](const auto &hook) { return dynamic_cast<const BeforeNode *>(hook.get()) != nullptr; };
  return std::any_of(hooks.begin(), hooks.end(), is_ours);
}

// Lets the nodes that the calling thread has made for a tensor, since its sequence number was `since`, run without
// autocast. What an operator computed in f32 has products in its backward, which autocast casts in a backward pass inside
// of a region, whichever operator they belong to.
void run_without_autocast(const at::Tensor &t, uint64_t since) {
  if (!t.defined() || !t.requires_grad() || !c10::GradMode::is_enabled()) return;
  const uint64_t thread = at::RecordFunction::currentThreadId();
  c10::SmallVector<Node *, 8> open;
  const auto visit = [&](Node *node) {
    // A node that adds to the gradient of a leaf has the largest number.
    const bool is_new = node != nullptr && node->thread_id() == thread && node->sequence_nr() >= since &&
                        node->sequence_nr() != std::numeric_limits<uint64_t>::max();
    if (!is_new || is_marked(*node)) return;
    node->add_pre_hook(std::make_unique<BeforeNode>());
    node->add_post_hook(std::make_unique<AfterNode>());
    open.push_back(node);
  };
  visit(t.grad_fn().get());
  while (!open.empty()) {
    for (const auto &edge : open.pop_back_val()->next_edges()) visit(edge.function.get());
  }
}

void run_without_autocast(c10::ArrayRef<IValue> results, uint64_t since) {
  for (const IValue &result : results) {
    if (result.isTensor()) {
      run_without_autocast(result.toTensor(), since);
    } else if (result.isList()) {
      run_without_autocast(result.toListRef(), since);
    }
  }
}

// Replaces the arguments of an attention, which have been cast, by its result.
void compose(torch::jit::Stack *stack, size_t count) {
  const c10::impl::ExcludeDispatchKeyGuard no_overrides(kOverrides);
  auto result = composed_attention(c10::ArrayRef<IValue>(stack->data() + (stack->size() - count), count));
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, std::move(result));
}

// What is to be done with a call.
struct Found {
  const Rule *rule;
  bool normalizes, casts_back;
  c10::DeviceType device;
};

std::optional<Found> find(const c10::OperatorHandle &op, c10::ArrayRef<IValue> arguments) {
  if (overrides == nullptr) return std::nullopt;
  const auto found = overrides->find(op.operator_name());
  if (found == overrides->end()) return std::nullopt;
  const auto device = autocast_device(arguments);
  const Rule *rule = device ? found->second.find(arguments) : nullptr;
  if (rule == nullptr) return std::nullopt;
  return Found{rule, found->second.normalizes, found->second.casts_back, *device};
}

// Called for the operators of the registry on a thread with overrides, or that averages running statistics.
void run(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kOverrides);
  const size_t count = op.schema().arguments().size();
  const CountedCall call(op, stack->data() + (stack->size() - count));
  const auto found = find(op, c10::ArrayRef<IValue>(stack->data() + (stack->size() - count), count));
  if (!found) return op.redispatchBoxed(below, stack);
  const auto [rule, normalizes, casts_back, device] = *found;
  const bool f32 = rule->run_as == TAMP_RUN_F32;
  const auto dtype = f32 ? at::kFloat : at::autocast::get_autocast_dtype(device);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  IValue *first = stack->data() + (stack->size() - count);
  Statistics copied;
  if (rule->run_as == TAMP_RUN_COMPOSED) lower_mask(first);
  if (normalizes) {
    copied = cast_normalization(op.schema(), first, f32, dtype, device);
  } else {
    for (size_t i = 0; i < count; ++i) first[i] = cast(first[i], dtype, device);
  }
  if (rule->run_as == TAMP_RUN_COMPOSED) return compose(stack, count);
  const uint64_t began = at::sequence_number::peek();
  op.redispatchBoxed(below - c10::autocast_dispatch_keyset, stack);
  write_back(copied);
  if (!f32 || !casts_back) return;
  const size_t results = op.schema().returns().size();
  run_without_autocast(c10::ArrayRef<IValue>(stack->data() + (stack->size() - results), results), began);
}

std::mutex mutex;

// The operators with a kernel of this key, and all overrides. None of it is ever freed: a captured state may name
// overrides at any time, and a thread may outlive the statics of this file. The caller interns equal overrides, so that
// they stay few.
struct Registry {
  Registry() { others.fallback(torch::CppFunction::makeFallthrough()); }

  torch::Library others{torch::Library::IMPL, "_", kOverrides, __FILE__, __LINE__};
  std::unordered_map<c10::OperatorName, c10::RegistrationHandleRAII> kernels;
  std::vector<std::unique_ptr<const Overrides>> all;
};

// Lets libtorch skip the key at the first call.
Registry &registry() {
  static auto *const registry = new Registry();
  return *registry;
}

bool takes_tensors(const c10::FunctionSchema &schema) {
  const auto &arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument &argument) {
    return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
           argument.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors()) ||
           argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

// Whether an operator works on copies of its inputs as well as on these: it neither writes to them, but for running
// statistics, nor returns views. Two operators write to an input although their schemas do not say so, and one that
// returns nothing is called for what it does to its inputs.
bool can_be_cast(const std::string &name, const c10::FunctionSchema &schema) {
  if (name == "aten::_copy_from" || name == "aten::_copy_from_and_resize" || schema.returns().empty()) return false;
  const auto is_alias = [](const c10::Argument &argument) { return argument.alias_info() != nullptr; };
  const auto &arguments = schema.arguments(), &returns = schema.returns();
  return takes_tensors(schema) && std::none_of(arguments.begin(), arguments.end(), is_alias) &&
         std::none_of(returns.begin(), returns.end(), is_alias);
}

// Adds a rule for the overloads of an operator to a list that may have rules for half precision. Returns what is wrong,
// or TAMP_OVERRIDE_OK.
uint8_t add(Overrides &to, const std::vector<c10::OperatorName> &known, const tamp_rule &added_rule, bool has_half) {
  const std::string name = added_rule.name;
  const Rule rule{added_rule.at_least, added_rule.below, added_rule.most_bytes, added_rule.run_as};
  if (rule.run_as == TAMP_RUN_COMPOSED && name != "aten::scaled_dot_product_attention") return TAMP_OVERRIDE_WHOLE;
  bool exists = false, added = false;
  for (const auto &candidate : known) {
    if (candidate.name != name) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(candidate);
    if (!op) continue;
    exists = true;
    if (!can_be_cast(name, op->schema())) continue;
    intercept(*op);
    auto &override = to[candidate];
    override.measure = measure_of(name, op->schema());
    override.normalizes = normalizes(name, op->schema());
    // Where an operator works element by element, so does its backward, by operators of which autocast casts none.
    override.casts_back = has_half || !op->hasTag(at::Tag::pointwise);
    override.rules.push_back(rule);
    added = true;
  }
  return added ? TAMP_OVERRIDE_OK : exists ? TAMP_OVERRIDE_ALIASES : TAMP_OVERRIDE_UNKNOWN;
}

}  // namespace

uint32_t current_overrides() noexcept { return current; }

std::optional<uint8_t> overridden(const c10::OperatorHandle &op, c10::ArrayRef<IValue> arguments) {
  const auto found = find(op, arguments);
  return found ? std::optional(found->rule->run_as) : std::nullopt;
}

void set_overrides(uint32_t number) {
  if (number == current) return;
  const Overrides *next = nullptr;
  if (number != 0) {
    const std::lock_guard<std::mutex> lock(mutex);
    next = registry().all.at(number - 1).get();
  }
  current = number;
  overrides = next;
  include_kernel(next != nullptr || averages_statistics());
}

void intercept(const c10::OperatorHandle &op) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto &kernels = registry().kernels;
  const c10::OperatorName &name = op.operator_name();
  if (kernels.count(name) != 0) return;
  // Other threads may call the operator meanwhile. libtorch writes the kernel before it stops skipping the key, as for
  // every library that is loaded while others run.
  auto kernel = c10::KernelFunction::makeFromBoxedFunction<&run>();
  kernels.emplace(name, c10::Dispatcher::singleton().registerImpl(name, kOverrides, std::move(kernel), std::nullopt,
                                                                  nullptr, "tch_amp"));
}

void include_kernel(bool included) { c10::impl::tls_set_dispatch_key_included(kOverrides, included); }

}  // namespace tamp

extern "C" {

uint32_t tamp_overrides_add(const tamp_rule *rules, size_t count, size_t *refused, uint8_t *problem,
                            char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint32_t {
    const auto known = c10::Dispatcher::singleton().getAllOpNames();
    auto made = std::make_unique<tamp::Overrides>();
    const auto is_half = [](const tamp_rule &rule) { return rule.run_as != TAMP_RUN_F32; };
    const bool has_half = std::any_of(rules, rules + count, is_half);
    for (size_t i = 0; i < count; ++i) {
      *problem = tamp::add(*made, known, rules[i], has_half);
      *refused = i;
      if (*problem != TAMP_OVERRIDE_OK) return 0;
    }
    const std::lock_guard<std::mutex> lock(tamp::mutex);
    auto &all = tamp::registry().all;
    all.push_back(std::move(made));
    return static_cast<uint32_t>(all.size());
  });
}

}  // extern "C"
