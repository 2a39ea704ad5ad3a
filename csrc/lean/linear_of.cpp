// A linear layer whose input is an activation or a normalization. The layer keeps the input of the activation or of the
// normalization, and not the result: the backward pass computes that again, by the same operators in the same dtypes.
// The backward pass consists of operators that have derivatives, so autograd computes second derivatives by itself.
//
// Where half precision is emulated, the operators themselves are called, one after the other.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "border/guarded.h"
#include "function/function_node.h"
#include "lean/region.h"

#ifdef TAMP_WITH_INSIGHT
#include "insight/recording.h"
#endif

namespace tamp {
namespace {

using at::Tensor;

Tensor cast_to(const Tensor &t, std::optional<at::ScalarType> dtype) { return dtype && t.defined() ? t.to(*dtype) : t; }

// The gradient of a SiLU. libtorch's kernel has no derivative.
Tensor silu_gradient(const Tensor &grad, const Tensor &xs) {
  if (!at::GradMode::is_enabled()) return at::silu_backward(grad, xs);
  const Tensor sigmoid = xs.sigmoid();
  return grad * sigmoid * (1 + xs * (1 - sigmoid));
}

// An operator by its name.
c10::OperatorHandle operator_of(const char *name, const char *overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// Makes an optional argument of a tensor that may be undefined. Some operators would take an undefined tensor for a
// given argument.
std::optional<Tensor> given(const Tensor &t) { return t.defined() ? std::optional(t) : std::nullopt; }

// The tensors from which the input of a linear layer is computed, or their gradients: the program's tensor, and the
// weight and the bias of a normalization.
using Sources = std::array<Tensor, 3>;

// An activation in front of a linear layer. It casts as the regions do in which it was made.
class ActivationInput {
 public:
  ActivationInput(uint8_t kind, const Tensor &xs) : kind_(kind) {
    static const auto gelu = operator_of("aten::gelu"), silu = operator_of("aten::silu");
    if (kind == TAMP_GELU || kind == TAMP_GELU_TANH) {
      const c10::IValue call[] = {xs, approximate()};
      cast_ = cast_of(gelu, call);
      return;
    }
    const c10::IValue call[] = {like({xs})};
    cast_ = cast_of(silu, call);
    if (kind == TAMP_SILU) return;
    static const auto mul = operator_of("aten::mul", "Tensor");
    const auto half = halves(xs);
    const c10::IValue product[] = {half[0], half[1]};
    cast_product_ = cast_of(mul, product);
  }

  static constexpr const char *kFunction = "activation_linear", *kNode = "ActivationLinearBackward";

  // Returns a tensor with the shape and the device of the layer's input.
  Tensor like(const Sources &sources) const { return kind_ == TAMP_SWIGLU ? halves(sources[0])[0] : sources[0]; }

  // Whether the derivative needs what `run` returns.
  bool needs_values() const { return kind_ == TAMP_SWIGLU; }

  // The result of the activation, and what its derivative needs.
  struct Values {
    Tensor out, gate, up, activated;
  };

  Values run(const Sources &sources) const {
    const Tensor &xs = sources[0];
    if (kind_ == TAMP_SILU) return {at::silu(cast_to(xs, cast_)), {}, {}, {}};
    if (kind_ != TAMP_SWIGLU) return {at::gelu(cast_to(xs, cast_), approximate()), {}, {}, {}};
    const auto half = halves(xs);
    Values values;
    values.gate = cast_to(half[0], cast_);
    values.activated = at::silu(values.gate);
    values.up = cast_to(half[1], cast_product_);
    values.out = cast_to(values.activated, cast_product_) * values.up;
    return values;
  }

  Sources backward(const Tensor &grad, const Values &values, const Sources &sources, std::array<bool, 3>) const {
    const Tensor &xs = sources[0];
    if (kind_ == TAMP_SILU) return {silu_gradient(grad, cast_to(xs, cast_)).to(xs.scalar_type())};
    if (kind_ != TAMP_SWIGLU) {
      return {at::gelu_backward(grad, cast_to(xs, cast_), approximate()).to(xs.scalar_type())};
    }
    const Tensor activated = cast_to(values.activated, cast_product_);
    const Tensor of_activated = (grad * values.up).to(values.activated.scalar_type());
    const Tensor of_gate = silu_gradient(of_activated, values.gate).to(xs.scalar_type());
    return {at::cat({of_gate, (grad * activated).to(xs.scalar_type())}, -1)};
  }

 private:
  const char *approximate() const { return kind_ == TAMP_GELU_TANH ? "tanh" : "none"; }

  // The half that is activated, and the half by which it is multiplied.
  static std::array<Tensor, 2> halves(const Tensor &xs) {
    const int64_t width = xs.size(-1) / 2;
    return {xs.narrow(-1, 0, width), xs.narrow(-1, width, width)};
  }

  uint8_t kind_;
  std::optional<at::ScalarType> cast_, cast_product_;
};

// A normalization in front of a linear layer.
class NormInput {
 public:
  NormInput(const tamp_norm &norm, const Sources &sources)
      : shape_(norm.shape, norm.shape + norm.dims), eps_(norm.eps), is_rms_(norm.is_rms != 0) {
    const auto &[xs, weight, bias] = sources;
    if (is_rms_) {
      static const auto rms_norm = operator_of("aten::rms_norm");
      const c10::IValue call[] = {xs, shape_, given(weight), eps_};
      cast_ = cast_of(rms_norm, call);
      return;
    }
    static const auto layer_norm = operator_of("aten::layer_norm"), inner = operator_of("aten::native_layer_norm");
    const c10::IValue call[] = {xs, shape_, given(weight), given(bias), eps_, /*cudnn_enable=*/true};
    cast_ = cast_of(layer_norm, call);
    // Where layer_norm is on no list, it calls this operator, which may be on one.
    if (!cast_) cast_ = cast_of(inner, c10::ArrayRef<c10::IValue>(call, 5));
  }

  static constexpr const char *kFunction = "norm_linear", *kNode = "NormLinearBackward";

  const Tensor &like(const Sources &sources) const { return sources[0]; }

  bool needs_values() const { return true; }

  // The result and its statistics. An RMSNorm has statistics only where the device has a kernel for it.
  struct Values {
    Tensor out, mean, rstd;
  };

  Values run(const Sources &sources) const {
    const auto [xs, weight, bias] = in_dtype(sources);
    Values values;
    if (!is_rms_) {
      std::tie(values.out, values.mean, values.rstd) =
          at::native_layer_norm(xs, shape_, given(weight), given(bias), eps_);
    } else if (has_kernel(xs, weight)) {
      std::tie(values.out, values.rstd) = at::_fused_rms_norm(xs, shape_, given(weight), eps_);
    } else {
      values.out = at::rms_norm(xs, shape_, given(weight), eps_);
    }
    return values;
  }

  Sources backward(const Tensor &grad, const Values &values, const Sources &sources, std::array<bool, 3> wanted) const {
    const auto [xs, weight, bias] = in_dtype(sources);
    Sources grads;
    if (!is_rms_) {
      std::tie(grads[0], grads[1], grads[2]) = at::native_layer_norm_backward(
          grad, xs, shape_, values.mean, values.rstd, given(weight), given(bias), wanted);
    } else if (values.rstd.defined()) {
      std::tie(grads[0], grads[1]) =
          at::_fused_rms_norm_backward(grad, xs, shape_, values.rstd, given(weight), {wanted[0], wanted[1]});
    } else {
      grads = rms_backward(grad, xs, weight, wanted);
    }
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) grads[i] = grads[i].to(sources[i].scalar_type());
    }
    return grads;
  }

 private:
  Sources in_dtype(const Sources &sources) const {
    return {cast_to(sources[0], cast_), cast_to(sources[1], cast_), cast_to(sources[2], cast_)};
  }

  // Whether an RMSNorm is computed by the device's own kernel. That has no second derivatives, so it must not be used
  // where these may be asked for.
  static bool has_kernel(const Tensor &xs, const Tensor &weight) {
    static const auto fused = operator_of("aten::_fused_rms_norm_backward");
    return !at::GradMode::is_enabled() && (!weight.defined() || weight.scalar_type() == xs.scalar_type()) &&
           fused.hasKernelForDispatchKey(xs.options().computeDispatchKey());
  }

  // The gradients of x / sqrt(mean(x^2) + eps) times the weight: in f32, as libtorch computes them.
  Sources rms_backward(const Tensor &grad, const Tensor &xs, const Tensor &weight, std::array<bool, 3> wanted) const {
    const auto wide = xs.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    std::vector<int64_t> inner, outer;
    const auto dims = xs.dim(), first = dims - static_cast<int64_t>(shape_.size());
    for (int64_t dim = 0; dim < dims; ++dim) (dim < first ? outer : inner).push_back(dim);
    const Tensor x = xs.to(wide), g = grad.to(wide);
    const Tensor factor = (x.square().mean(inner, /*keepdim=*/true) + eps_).rsqrt(), normalized = x * factor;
    Sources grads;
    if (wanted[0]) {
      const Tensor of = weight.defined() ? g * weight.to(wide) : g;
      grads[0] = factor * (of - normalized * (of * normalized).mean(inner, /*keepdim=*/true));
    }
    if (wanted[1]) grads[1] = outer.empty() ? g * normalized : (g * normalized).sum(outer);
    return grads;
  }

  std::vector<int64_t> shape_;
  double eps_;
  bool is_rms_;
  std::optional<at::ScalarType> cast_;
};

// The rows of a layer's input, in the dtype of its product.
Tensor rows_of(const Tensor &input, at::ScalarType dtype) { return input.reshape({-1, input.size(-1)}).to(dtype); }

// The derivative of a linear layer whose input `Input` computes.
template <typename Input>
class LinearOfNode final : public Node {
 public:
  // `dtype` is that of the layer's input before it is cast for the product.
  LinearOfNode(Input input, at::ScalarType dtype, const Sources &sources, const Tensor &weight,
               torch::autograd::edge_list &&edges)
      : Node(std::move(edges)), input_(std::move(input)), dtype_(dtype), weight_(weight, /*is_output=*/false) {
    for (size_t i = 0; i < sources.size(); ++i) sources_[i] = SavedVariable(sources[i], /*is_output=*/false);
  }

  std::string name() const override { return Input::kNode; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto &source : sources_) source.reset_data();
    weight_.reset_data();
  }

 protected:
  variable_list apply(variable_list &&grads) override {
    const OutsideRegions own;
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list out(5);
    if (!grads[0].defined()) return out;
    // Unpacking fails if a tensor was changed in place or released.
    Sources sources;
    for (size_t i = 0; i < sources.size(); ++i) sources[i] = sources_[i].unpack();
    const Tensor weight = weight_.unpack(), grad = grads[0].reshape({-1, weight.size(0)});
    const auto is_wanted = [&](size_t i) { return task_should_compute_output(i); };
    const std::array<bool, 3> wanted{is_wanted(0), is_wanted(1), is_wanted(2)};
    const bool wants_sources = wanted[0] || wanted[1] || wanted[2];
    typename Input::Values values;
    if (is_wanted(3) || (wants_sources && input_.needs_values())) values = input_.run(sources);
    if (is_wanted(3)) out[3] = at::mm(grad.t(), rows_of(values.out, weight.scalar_type()));
    if (is_wanted(4)) out[4] = grad.sum(0);
    if (!wants_sources) return out;
    // It is not needed any more, and the gradient can have its memory.
    values.out = Tensor();
    const Tensor of_input = at::mm(grad, weight).reshape(input_.like(sources).sizes()).to(dtype_);
    Sources found = input_.backward(of_input, values, sources, wanted);
    for (size_t i = 0; i < found.size(); ++i) out[i] = std::move(found[i]);
    return out;
  }

 private:
  Input input_;
  at::ScalarType dtype_;
  std::array<SavedVariable, 3> sources_;
  SavedVariable weight_;
};

// Computes the layer. The weight and the bias have the dtype of its product.
template <typename Input>
Tensor linear_of(Input input, const Sources &sources, const Tensor &weight, const Tensor &bias) {
  const OutsideRegions own;
  const auto &[xs, norm_weight, norm_bias] = sources;
  Tensor out;
  at::ScalarType dtype;
  {
    const c10::NoGradGuard no_grad;
    const Tensor from = input.run(sources).out;
    dtype = from.scalar_type();
    auto shape = from.sizes().vec();
    shape.back() = weight.size(0);
    // A program may change the result in place, which autograd would refuse for a view.
    out = at::_unsafe_view(at::linear(rows_of(from, weight.scalar_type()), weight, bias), shape);
  }
  const bool is_recorded =
      at::GradMode::is_enabled() && torch::autograd::compute_requires_grad(xs, norm_weight, norm_bias, weight, bias);
  if (!is_recorded) return out;
  auto edges = torch::autograd::collect_next_edges(xs, norm_weight, norm_bias, weight, bias);
#ifdef TAMP_WITH_INSIGHT
  // Reports name what the node keeps by this function.
  note_function(Input::kFunction, 0, static_cast<uint64_t>(-1));
#endif
  auto node = make_node<LinearOfNode<Input>>(std::move(input), dtype, sources, weight, std::move(edges));
  auto *made = node.get();
  torch::autograd::impl::set_gradient_edge(out, {std::move(node), made->add_input_metadata(out)});
  return out;
}

// Calls the operators that a layer replaces, in the program's regions.
Tensor composed_activation(const Tensor &xs, uint8_t kind) {
  if (kind == TAMP_SILU) return at::silu(xs);
  if (kind != TAMP_SWIGLU) return at::gelu(xs, kind == TAMP_GELU_TANH ? "tanh" : "none");
  const int64_t width = xs.size(-1) / 2;
  return at::silu(xs.narrow(-1, 0, width)) * xs.narrow(-1, width, width);
}

Tensor composed_norm(const tamp_norm &norm, const Sources &sources) {
  const auto &[xs, weight, bias] = sources;
  const at::IntArrayRef shape(norm.shape, norm.dims);
  return norm.is_rms != 0 ? at::rms_norm(xs, shape, given(weight), norm.eps)
                          : at::layer_norm(xs, shape, given(weight), given(bias), norm.eps);
}

// Computes the layer in the program's regions. Its input is described by what `make` returns; where half precision is
// emulated, it is what `compose` returns.
template <typename Make, typename Compose>
tamp_tensor *linear_in_regions(const Sources &sources, const tamp_tensor *weight, const tamp_tensor *bias,
                               const Make &make, const Compose &compose) {
  const Tensor w = tensor(weight), b = bias == nullptr ? Tensor() : tensor(bias);
  if (is_emulated()) return give(at::linear(compose(), w, b));
  auto input = make();
  const auto cast = cast_of_linear(input.like(sources), w, b);
  return give(linear_of(std::move(input), sources, cast_in_region(w, cast), cast_in_region(b, cast)));
}

}  // namespace
}  // namespace tamp

extern "C" {

tamp_tensor *tamp_activation_linear(const tamp_tensor *xs, uint8_t activation, const tamp_tensor *weight,
                                    const tamp_tensor *bias, char **err) noexcept {
  return tamp::guarded_inside_regions(err, [&] {
    const tamp::Sources sources{tamp::tensor(xs)};
    return tamp::linear_in_regions(
        sources, weight, bias, [&] { return tamp::ActivationInput(activation, sources[0]); },
        [&] { return tamp::composed_activation(sources[0], activation); });
  });
}

tamp_tensor *tamp_norm_linear(const tamp_tensor *xs, const tamp_norm *norm, const tamp_tensor *weight,
                              const tamp_tensor *bias, char **err) noexcept {
  return tamp::guarded_inside_regions(err, [&] {
    const auto optional = [](const tamp_tensor *t) { return t == nullptr ? at::Tensor() : tamp::tensor(t); };
    const tamp::Sources sources{tamp::tensor(xs), optional(norm->weight), optional(norm->bias)};
    return tamp::linear_in_regions(
        sources, weight, bias, [&] { return tamp::NormInput(*norm, sources); },
        [&] { return tamp::composed_norm(*norm, sources); });
  });
}

}  // extern "C"
