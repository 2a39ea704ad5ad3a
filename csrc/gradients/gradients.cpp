// The gradients of a list of parameters: describing, separating, taking, dropping and adding them.

#include <ATen/ATen.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "border/guarded.h"
#include "gradients/gradients.h"
#include "gradients/storage.h"
#include "optim/masters.h"

namespace tamp {
namespace {

using at::Tensor;

// Counts on the host how often a backward pass has added to the gradient of a leaf.
class AdditionCount final : public torch::autograd::FunctionPostHook {
 public:
  explicit AdditionCount(Tensor count) : count_(std::move(count)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list &outputs,
                                            const torch::autograd::variable_list & /*inputs*/) override {
    ++*count_.mutable_data_ptr<int64_t>();
    return outputs;
  }

 private:
  Tensor count_;
};

uintptr_t identity(const Tensor &t) { return reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()); }

// Returns the strided tensor that holds the numbers of a gradient.
Tensor values(const Tensor &gradient) {
  if (!gradient.is_sparse()) return gradient;
  return static_cast<const at::SparseTensorImpl *>(gradient.unsafeGetTensorImpl())->values();
}

// Whether the numbers of a gradient may be those of another tensor as well.
bool shares_memory(const Tensor &gradient) {
  if (!gradient.is_sparse()) return is_shared(gradient);
  const Tensor numbers = values(gradient);
  // Two sparse gradients can have one tensor of values. One of the handles is the one here.
  return is_shared(numbers) || numbers.use_count() > 2;
}

// A gradient that shares memory. If only its parameter holds the tensor, nobody sees that another takes its place.
// libtorch's Reducer, for one, holds the gradients that are views of its buckets.
struct SharedGradient {
  const Tensor *parameter;
  bool is_held_elsewhere;
};

std::vector<SharedGradient> shared_gradients(tamp_tensor *const *parameters, size_t count) {
  std::vector<SharedGradient> out;
  std::unordered_set<const void *> seen;  // a parameter that is listed twice has one gradient
  for (size_t i = 0; i < count; ++i) {
    const Tensor &parameter = tensor(parameters[i]);
    if (!parameter.defined()) continue;
    const Tensor &gradient = tamp::gradient(parameter);
    if (!gradient.defined() || !shares_memory(gradient)) continue;
    if (seen.insert(gradient.unsafeGetTensorImpl()).second) out.push_back({&parameter, gradient.use_count() > 1});
  }
  return out;
}

// Replaces gradients by copies: those that have memory in common with another of them, those whose own elements share
// memory and, if `from_all`, those whose memory is used by an unknown tensor. Copies all of them before it replaces one.
void copy_shared(const std::vector<SharedGradient> &shared, bool from_all) {
  if (shared.empty()) return;
  const c10::NoGradGuard no_grad;
  std::vector<Tensor> numbers;
  std::unordered_map<uintptr_t, size_t> owners;  // by storage, how many of its owners are known
  for (const auto &one : shared) {
    numbers.push_back(values(tamp::gradient(*one.parameter)));
    ++owners[memory_of(numbers.back())];
  }
  const auto kept = keepers(numbers);
  std::vector<std::pair<const Tensor *, Tensor>> copies;
  for (size_t i = 0; i < shared.size(); ++i) {
    const size_t all = numbers[i].storage().use_count();
    const bool is_used_by_others = !shared[i].is_held_elsewhere && all > owners[memory_of(numbers[i])];
    if (kept[i] == i && !overlaps(numbers[i]) && !(from_all && is_used_by_others)) continue;
    copies.emplace_back(shared[i].parameter, tamp::gradient(*shared[i].parameter).clone());
  }
  for (auto &[parameter, copy] : copies) parameter->mutable_grad() = std::move(copy);
}

}  // namespace

void separate(tamp_tensor *const *parameters, size_t count, bool from_all) {
  copy_shared(shared_gradients(parameters, count), from_all);
}

void for_each_leaf(const Tensor &loss, const std::function<void(const Tensor &)> &f) {
  using torch::autograd::Node;
  if (!loss.requires_grad()) return;
  if (loss.grad_fn() == nullptr) return f(loss);
  // A list of what is left to visit, because a graph can be deeper than the stack.
  std::vector<Node *> left{loss.grad_fn().get()};
  std::unordered_set<const Node *> seen{left.front()};
  while (!left.empty()) {
    Node *node = left.back();
    left.pop_back();
    if (const auto *leaf = dynamic_cast<torch::autograd::AccumulateGrad *>(node)) {
      f(leaf->variable);
      continue;
    }
    for (const auto &edge : node->next_edges()) {
      Node *next = edge.function.get();
      if (next != nullptr && seen.insert(next).second) left.push_back(next);
    }
  }
}

tamp_gradient inspect(const Tensor &parameter) {
  tamp_gradient out = {};
  if (!parameter.defined()) return out;
  out.parameter = identity(parameter);
  if (parameter.requires_grad()) out.flags |= TAMP_GRADIENT_REQUIRES_GRAD;
  const Tensor &gradient = tamp::gradient(parameter);
  if (!gradient.defined()) return out;
  const at::Device device = gradient.device();
  const at::ScalarType dtype = gradient.scalar_type();
  out.gradient = identity(gradient);
  out.memory = memory_of(gradient);
  out.version = gradient.is_inference() ? 0 : static_cast<uint32_t>(gradient._version());
  out.device_type = static_cast<int8_t>(device.type());
  out.device_index = static_cast<int8_t>(device.index());
  out.dtype = static_cast<int8_t>(dtype);
  if (dtype != parameter.scalar_type()) out.flags |= TAMP_GRADIENT_OTHER_DTYPE;
  if (device.is_meta() || gradient.is_nested() || parameter.is_nested()) return out;
  if (device != parameter.device() || gradient.sizes() != parameter.sizes()) out.flags |= TAMP_GRADIENT_OTHER_SHAPE;
  if (gradient.is_sparse()) {
    out.flags |= TAMP_GRADIENT_SPARSE;
  } else if (gradient.layout() == at::kStrided) {
    out.flags |= TAMP_GRADIENT_STRIDED;
  }
  if (shares_memory(gradient)) out.flags |= TAMP_GRADIENT_SHARED;
  return out;
}

}  // namespace tamp

using at::Tensor;

extern "C" {

void tamp_gradients_inspect(tamp_tensor *const *parameters, size_t count, uint8_t hold, tamp_gradient *gradients,
                            char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) gradients[i] = tamp::inspect(tamp::tensor(parameters[i]));
    if (hold == 0) return;
    // Nothing fails from here on.
    for (size_t i = 0; i < count; ++i) {
      if (gradients[i].memory != 0) tamp::hold(tamp::gradient(tamp::tensor(parameters[i])));
    }
  });
}

void tamp_gradients_release(const tamp_gradient *gradients, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) tamp::release(gradients[i].memory);
}

void tamp_gradients_separate(tamp_tensor *const *parameters, size_t count, char **err) noexcept {
  tamp::guarded(err, [&] { tamp::separate(parameters, count, /*from_all=*/true); });
}

void tamp_gradients_separate_leaves(const tamp_tensor *loss, char **err) noexcept {
  tamp::guarded(err, [&] {
    std::vector<Tensor> leaves;
    tamp::for_each_leaf(tamp::tensor(loss), [&](const Tensor &leaf) {
      if (tamp::gradient(leaf).defined()) leaves.push_back(leaf);
    });
    std::vector<tamp_tensor *> pointers;
    for (auto &leaf : leaves) pointers.push_back(reinterpret_cast<tamp_tensor *>(&leaf));
    tamp::separate(pointers.data(), pointers.size(), /*from_all=*/true);
  });
}

size_t tamp_leaves(const tamp_tensor *loss, tamp_tensor *const *parameters, size_t count, tamp_tensor **leaves,
                   size_t room, char **err) noexcept {
  return tamp::guarded(err, [&]() -> size_t {
    std::unordered_set<const at::TensorImpl *> known;
    for (size_t i = 0; i < count; ++i) known.insert(tamp::tensor(parameters[i]).unsafeGetTensorImpl());
    size_t found = 0;
    tamp::for_each_leaf(tamp::tensor(loss), [&](const Tensor &leaf) {
      if (known.count(leaf.unsafeGetTensorImpl()) != 0) return;
      if (found < room) leaves[found] = tamp::give(leaf);
      ++found;
    });
    return found;
  });
}

tamp_tensor *tamp_leaf_count_additions(const tamp_tensor *leaf, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const auto node = torch::autograd::impl::grad_accumulator(tamp::tensor(leaf));
    TORCH_CHECK(node != nullptr, "the tensor is no leaf that requires a gradient");
    const Tensor count = at::zeros({}, at::kLong);
    node->add_post_hook(std::make_unique<tamp::AdditionCount>(count));
    return tamp::give(count);
  });
}

void tamp_gradients_drop(tamp_tensor *const *parameters, size_t count, uint8_t narrows, char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) {
      Tensor &parameter = tamp::tensor(parameters[i]);
      if (tamp::gradient(parameter).defined()) parameter.mutable_grad().reset();
      if (narrows != 0 || !tamp::is_half(parameter)) tamp::narrow_later_gradients(parameter);
    }
  });
}

void tamp_gradients_take(tamp_tensor *const *parameters, size_t count, tamp_tensor **gradients, char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) {
      Tensor &parameter = tamp::tensor(parameters[i]);
      if (!tamp::gradient(parameter).defined()) continue;
      gradients[i] = tamp::give(tamp::gradient(parameter));
      parameter.mutable_grad().reset();
    }
  });
}

tamp_tensor *tamp_gradient_rest(const tamp_tensor *parameter, const tamp_tensor *before, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const Tensor &gradient = tamp::gradient(tamp::tensor(parameter));
    TORCH_CHECK(gradient.defined(), "the parameter has no gradient");
    const Tensor numbers = gradient.is_sparse() ? gradient._values() : gradient;
    const Tensor rest = numbers.ne(0).any().to(at::kFloat);
    return tamp::give(before == nullptr ? rest : rest.mul(tamp::tensor(before)));
  });
}

void tamp_backward(const tamp_tensor *loss, uint8_t retain_graph, char **err) noexcept {
  tamp::guarded_inside_regions(err, [&] { tamp::tensor(loss).backward({}, retain_graph != 0); });
}

void tamp_gradients_add(tamp_tensor *const *parameters, tamp_tensor *const *gradients, size_t count,
                        char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    tamp::separate(parameters, count, /*from_all=*/true);
    std::vector<Tensor> sums, parts;  // dense gradients, which are added in one launch
    for (size_t i = 0; i < count; ++i) {
      Tensor &gradient = tamp::tensor(parameters[i]).mutable_grad();
      const Tensor &more = tamp::tensor(gradients[i]);
      if (!gradient.defined()) {
        gradient = more;
      } else if (gradient.is_sparse() && !more.is_sparse()) {
        gradient = more + gradient;  // libtorch does not implement the other order
      } else if (gradient.scalar_type() != at::result_type(gradient, more)) {
        gradient = gradient + more;
      } else if (gradient.is_sparse()) {
        gradient = (gradient + more).coalesce();  // the values of duplicate indices could add up to infinity later
      } else if (more.is_sparse()) {
        gradient.add_(more);
      } else {
        sums.push_back(gradient);
        parts.push_back(more);
      }
    }
    tamp::end_lazy_copies(sums);
    if (!sums.empty()) at::_foreach_add_(sums, parts);
  });
}

}  // extern "C"
