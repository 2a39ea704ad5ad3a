// The node of a custom function in autograd's graph, whose backward is a callback.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable_info.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "border/deferred_destruction.h"
#include "border/guarded.h"

namespace tamp {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::VariableInfo;

// From libtorch 2.13 on, nodes are held by intrusive pointers. In older versions they are held by shared pointers.
#if __has_include(<torch/csrc/autograd/node.h>)
template <typename T>
using NodePtr = c10::intrusive_ptr<T>;

template <typename T, typename... Args>
NodePtr<T> make_node(Args &&...args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

inline constexpr std::string_view kFrameName = "TCH_AMP_FUNCTION";
inline const c10::DebugInfoKind kFrame(&kFrameName);
#define TAMP_NODE_RELEASES_RESOURCES
#else
template <typename T>
using NodePtr = std::shared_ptr<T>;

template <typename T, typename... Args>
NodePtr<T> make_node(Args &&...args) {
  return NodePtr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}

// An arbitrary number that libtorch does not use itself.
inline constexpr auto kFrame = static_cast<c10::DebugInfoKind>(0xa3);
#endif

// A running backward of a function. libtorch passes this information on to the threads of a backward pass that is
// started inside it, so that a node recognizes when it is run from within itself.
struct Frame : c10::DebugInfoBase {
  Frame(const Node *node, const Frame *outer) : node(node), outer(outer), keep(c10::ThreadLocalDebugInfo::current()) {}

  static const Frame *current() { return static_cast<const Frame *>(c10::ThreadLocalDebugInfo::get(kFrame)); }

  const Node *node;
  const Frame *outer;
  std::shared_ptr<c10::ThreadLocalDebugInfo> keep;  // owns `outer`
};

// The function value of the Rust side, which is dropped with this object.
class State {
 public:
  // The delegated constructor completes the object before the name is copied, so that the destructor drops the function
  // if the copy throws.
  explicit State(const tamp_function &function) : State(function, std::string()) {
    name_.assign(function.name, function.name_length);
    std::replace(name_.begin(), name_.end(), '\0', ' ');  // a NUL would end a message early
  }
  State(State &&other) noexcept : function_(other.function_), name_(std::move(other.name_)) {
    other.function_.state = nullptr;
  }
  State(const State &) = delete;
  State &operator=(const State &) = delete;
  State &operator=(State &&) = delete;
  ~State() { destroy({take()}); }

  // Removes the state and returns it.
  Owned take() { return Owned(std::exchange(function_.state, nullptr), function_.drop); }

  // Removes the values that forward saved and returns them.
  Owned take_values() {
    void *values = function_.state == nullptr ? nullptr : function_.take_saved(function_.state);
    return Owned(values, function_.free_saved);
  }

  const tamp_function &function() const { return function_; }

  // The name is a copy, because libtorch may ask a node for it on any thread, even while the function runs on another
  // one.
  const std::string &name() const { return name_; }

  bool has(uint8_t flag) const { return (function_.flags & flag) != 0; }

 private:
  State(const tamp_function &function, std::string name) : function_(function), name_(std::move(name)) {}

  tamp_function function_;
  std::string name_;
};

class FunctionNode final : public Node {
 public:
  FunctionNode(State state, torch::autograd::edge_list &&inputs) : Node(std::move(inputs)), state_(std::move(state)) {}

  std::string name() const override { return state_.name() + "Backward"; }
  const std::string &function_name() const { return state_.name(); }

  void reserve_saved(size_t count) { saved_.reserve(count); }

  void save(const at::Tensor &t) {
    if (t.defined()) {
      saved_.emplace_back(t, /*is_output=*/t.grad_fn().get() == this);
    } else {
      saved_.emplace_back();
    }
  }

  // Describes the outputs, so that zeros can take the place of missing gradients. This is unnecessary if all outputs
  // are differentiable, because then libtorch has described them in the node.
  void describe_outputs(const variable_list &outputs) {
    outputs_.reserve(outputs.size());
    for (const auto &t : outputs) outputs_.push_back(t.defined() ? VariableInfo(t) : VariableInfo());
  }

  at::Tensor saved(size_t index) const {
    TORCH_CHECK(index < saved_.size(), state_.name(), " saved ", saved_.size(), " tensors");
    auto *self = const_cast<FunctionNode *>(this);
    return saved_[index].unpack(self->getptr());
  }

  void release_variables() override {
    Remains remains;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      used_up_ = used_up_ || state_.has(TAMP_FUNCTION_SAVES_VALUES) || !saved_.empty();
      remains.values = state_.take_values();
      remains.saved.swap(saved_);
    }
    // The lock is released first, because a destructor may run a backward pass that leads here again.
    destroy(std::move(remains));
  }

#ifdef TAMP_NODE_RELEASES_RESOURCES
  void release_resources() override {
    Node::release_resources();
    destroy({state_.take()});
  }
#endif

 protected:
  variable_list apply(variable_list &&grads) override {
    const auto *outer = Frame::current();
    refuse_reentry(outer);
    std::lock_guard<std::mutex> lock(mutex_);
    if (used_up_) {
      throw std::runtime_error(state_.name() +
                               ": trying to backward through the graph a second time, but what its forward saved has "
                               "been freed; keep the graph (retain_graph) the first time");
    }
    at::OptionalDeviceGuard device_guard;
    materialize(grads, device_guard);
    const bool once = state_.has(TAMP_FUNCTION_ONCE_DIFFERENTIABLE) && at::GradMode::is_enabled();
    auto out = [&] {
      // The guards also restore what the callback may leave behind.
      at::AutoGradMode mode(at::GradMode::is_enabled() && !once);
      c10::DebugInfoGuard frame(kFrame, std::make_shared<Frame>(this, outer));
      return call_back(grads);
    }();
    for (size_t i = 0; i < out.size(); ++i) check_dtype(out[i], i);
    if (once) refuse_second_derivative(out, grads);
    return out;
  }

 private:
  void refuse_reentry(const Frame *frame) const {
    for (; frame != nullptr; frame = frame->outer) {
      if (frame->node == this) {
        throw std::runtime_error(state_.name() +
                                 ": its backward runs a backward that leads through itself again; compute "
                                 "the inner gradient from tensors that do not depend on its own output");
      }
    }
  }

  void materialize(variable_list &grads, at::OptionalDeviceGuard &device_guard) const {
    if (!state_.has(TAMP_FUNCTION_MATERIALIZE_GRADS)) return;
    const OutsideRegions own;
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) continue;
      grads[i] = i < outputs_.size() ? outputs_[i].zeros(device_guard) : input_metadata(i).zeros_like();
    }
  }

  variable_list call_back(variable_list &grads) const {
    c10::SmallVector<tamp_tensor *, 8> inputs;
    for (auto &g : grads) inputs.push_back(g.defined() ? reinterpret_cast<tamp_tensor *>(&g) : nullptr);
    c10::SmallVector<tamp_tensor *, 8> outputs(num_outputs(), nullptr);
    char *err = nullptr;
    const InsideRegions programs;
    const auto &function = state_.function();
    const auto *node = reinterpret_cast<const tamp_node *>(this);
    function.backward(function.state, node, inputs.data(), inputs.size(), outputs.data(), outputs.size(), &err);
    variable_list out;
    out.reserve(outputs.size());
    for (auto *t : outputs) out.push_back(t == nullptr ? at::Tensor() : take(t));
    if (err != nullptr) {
      const std::string text = state_.name() + ": " + err;
      free(err);
      throw std::runtime_error(text);
    }
    return out;
  }

  // Checks the dtype of a gradient. The engine checks shapes and devices, and casts between floating-point dtypes. It
  // would cast integers as well, though, and its message does not say which gradient is complex.
  void check_dtype(const at::Tensor &grad, size_t index) const {
    const auto &edge = next_edge(index);
    if (!grad.defined() || !edge.is_valid()) return;
    const auto got = grad.scalar_type();
    const auto want = c10::typeMetaToScalarType(edge.function->input_metadata(edge.input_nr).options().dtype());
    const bool fits = at::isFloatingType(got) || (at::isComplexType(got) && at::isComplexType(want));
    if (!fits) {
      throw std::runtime_error("Function " + name() + " returned an invalid gradient at index " +
                               std::to_string(index) + " - got " + c10::toString(got) + " for an input of " +
                               c10::toString(want));
    }
  }

  // Gives the gradients a history that fails when they are differentiated. It leads to everything that they depend on,
  // so that every derivative of them runs into the failure.
  void refuse_second_derivative(variable_list &grads, const variable_list &grad_outputs) const {
    auto edges = next_edges();
    for (const auto &grad : grad_outputs) {
      if (grad.defined()) edges.push_back(torch::autograd::impl::gradient_edge(grad));
    }
    auto error = make_node<torch::autograd::Error>(
        state_.name() + " is once differentiable: the gradients that its backward returned cannot be differentiated",
        std::move(edges));
    for (auto &grad : grads) {
      if (!grad.defined()) continue;
      grad = grad.detach();
      torch::autograd::impl::set_gradient_edge(grad, {error, error->add_input_metadata(grad)});
    }
  }

  State state_;
  std::vector<SavedVariable> saved_;
  std::vector<VariableInfo> outputs_;
  bool used_up_ = false;
};

}  // namespace tamp
