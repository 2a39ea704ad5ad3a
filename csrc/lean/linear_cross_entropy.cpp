// A linear layer and the cross entropy of its outputs. It computes in one of three ways:
//
// *Kept*: the forward pass keeps the logits in the dtype of the product, and no other copy of them. The backward pass
// overwrites them with their own gradient, the loss scale included. A second backward pass computes the logits again.
//
// *Blocks*: the forward pass computes the logits of a block of rows at a time and their gradients, before any loss
// scale, adds up that of the weight in f32, and keeps these gradients and no logits. The backward pass multiplies them
// by the gradient of the loss. Without a reduction, the backward pass computes the blocks again instead.
//
// *Composed*: where half precision is emulated, the operators that this replaces are called.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "border/guarded.h"
#include "function/function_node.h"
#include "gradients/parallel_chunks.h"
#include "kernels/kernels.h"
#include "lean/region.h"
#include "saved_tensors/keeper.h"

#ifdef TAMP_WITH_INSIGHT
#include "insight/recording.h"
#endif

namespace tamp {
namespace {

using at::Tensor;
using torch::autograd::edge_list;

// The options of a loss.
struct LossOptions {
  explicit LossOptions(const tamp_cross_entropy &raw)
      : reduction(raw.reduction),
        ignore_index(raw.ignore_index),
        class_weights(raw.class_weights == nullptr ? Tensor() : tensor(raw.class_weights).detach()),
        label_smoothing(raw.label_smoothing),
        soft_cap(raw.soft_cap),
        z_loss(raw.z_loss),
        max_bytes(raw.max_bytes) {}

  bool is_mean() const { return reduction == TAMP_LOSS_MEAN; }

  uint8_t reduction;
  int64_t ignore_index;
  Tensor class_weights;
  double label_smoothing, soft_cap, z_loss;
  uint64_t max_bytes;
};

// The rows of a loss: their targets, and the factors of their gradients. Except for the weights of the classes and the
// sums, each tensor has one number for each row. All are on the device of the logits, and what is not an index or a
// mask has the dtype of the loss.
struct Rows {
  Rows(const Tensor &targets, const LossOptions &options, int64_t classes, at::ScalarType wide) {
    const auto numbers = targets.options().dtype(wide);
    kept = targets.ne(options.ignore_index);
    // A target out of range must not be used as an index. On the CPU it was refused before; elsewhere its loss is NaN.
    index = at::where(kept, targets, 0).clamp(0, classes - 1);
    const Tensor lost = at::logical_and(kept, index.ne(targets));
    weights =
        options.class_weights.defined() ? options.class_weights.to(targets.device(), wide).contiguous() : Tensor();
    const Tensor one = at::ones({}, numbers), zero = at::zeros({}, numbers);
    nll = at::where(kept, weights.defined() ? weights.index_select(0, index) : one, zero);
    const Tensor nothing = at::full({}, std::numeric_limits<double>::quiet_NaN(), numbers);
    present = at::where(lost, nothing, at::where(kept, one, zero));
    weight_sum = weights.defined() ? weights.sum() : at::full({}, static_cast<double>(classes), numbers);
    if (options.is_mean()) {
      // PyTorch divides by the sum of the targets' weights. The z-loss has no weights, so it is divided by the count.
      total = nll.sum();
      count = kept.sum().to(wide);
    }
  }

  Tensor kept, index, weights, nll, present, weight_sum, total, count;
};

// A loss, with what its gradient is computed from.
class Loss {
 public:
  Loss(const Tensor &targets, LossOptions options, int64_t classes, at::ScalarType dtype)
      : options_(std::move(options)),
        classes_(classes),
        wide_(dtype == at::kDouble ? at::kDouble : at::kFloat),
        rows_(targets, options_, classes, wide_) {}

  const LossOptions &options() const { return options_; }
  at::ScalarType wide() const { return wide_; }
  int64_t count() const { return rows_.index.numel(); }
  const Tensor &log_sums() const { return log_sums_; }

  // Computes the losses of the rows from `begin` on from their logits, and keeps log(sum(exp(logits))) of each row.
  void forward(const Tensor &logits, int64_t begin) {
    if (!losses_.defined()) {
      losses_ = at::empty({count()}, rows_.nll.options());
      log_sums_ = at::empty({count()}, rows_.nll.options());
    }
    const int64_t rows = logits.size(0);
    auto target = at::empty({rows}, rows_.nll.options());
    auto smoothed = is_smooth() ? at::empty({rows}, rows_.nll.options()) : Tensor();
    const Tensor log_sums = log_sums_.narrow(0, begin, rows);
    if (logits.is_cpu()) {
      statistics_in_loops(logits, begin, log_sums, target, smoothed);
    } else {
      statistics_in_operators(logits, begin, log_sums, target, smoothed);
    }
    const auto of = [&](const Tensor &t) { return t.narrow(0, begin, rows); };
    Tensor losses = (log_sums - target).mul_(of(rows_.nll));
    if (is_smooth()) {
      losses.mul_(1 - options_.label_smoothing);
      losses.add_(log_sums * rows_.weight_sum - smoothed, options_.label_smoothing / static_cast<double>(classes_));
    }
    // The loss of an ignored row is 0, even if its logits are not finite.
    losses = at::where(of(rows_.kept), losses, at::zeros({}, losses.options())).mul_(of(rows_.present));
    losses_.narrow(0, begin, rows).copy_(losses);
  }

  // Returns the reduced loss after `forward` of all rows, or, without a reduction, the losses in this shape. Nothing
  // else keeps the returned tensor.
  Tensor reduced(at::IntArrayRef shape) {
    const Tensor losses = std::exchange(losses_, Tensor());
    const Tensor sizes = options_.z_loss == 0 ? Tensor()
                                              : at::where(rows_.kept, log_sums_.square() * options_.z_loss,
                                                          at::zeros({}, losses.options()));
    // A program may change the losses in place, which autograd would refuse for a view.
    if (options_.reduction == TAMP_LOSS_NONE) {
      return at::_unsafe_view(sizes.defined() ? losses + sizes : losses, shape);
    }
    Tensor loss = losses.sum();
    if (options_.is_mean()) loss = loss / rows_.total;
    if (!sizes.defined()) return loss;
    return loss + (options_.is_mean() ? sizes.sum() / rows_.count : sizes.sum());
  }

  // Overwrites the logits of the rows from `begin` on with their gradient, times `grad`: one number, or one for each
  // row. If `outer`, the caller divides by the weights of a mean.
  void backward(const Tensor &logits, int64_t begin, const Tensor &grad, bool outer) const {
    const int64_t rows = logits.size(0);
    const auto of = [&](const Tensor &t) { return t.dim() == 0 ? t : t.narrow(0, begin, rows); };
    const Tensor zero = at::zeros({}, rows_.nll.options());
    const auto kept = [&](const Tensor &t) { return at::where(of(rows_.kept), t, zero); };
    const Tensor scale = options_.is_mean() && !outer ? grad / rows_.total : grad;
    // A target out of range makes the gradient NaN, too.
    const Tensor each = kept(of(scale) * of(rows_.present));
    const double smoothing = options_.label_smoothing / static_cast<double>(classes_);
    const Tensor target = kept(each * of(rows_.nll) * (1 - options_.label_smoothing));
    const Tensor smoothed = is_smooth() ? each * smoothing : Tensor();
    Tensor probability = is_smooth() ? target + smoothed * rows_.weight_sum : target;
    if (options_.z_loss != 0) {
      Tensor size = of(grad) * (2 * options_.z_loss);
      if (options_.is_mean()) size = (outer ? size * rows_.total : size) / rows_.count;
      probability = probability + kept(size * of(log_sums_));
    }
    if (logits.is_cpu()) {
      gradient_in_loops(logits, begin, probability, smoothed, target);
    } else {
      gradient_in_operators(logits, begin, probability, smoothed, target);
    }
  }

  // What the caller divides the gradients of blocks by in the end; undefined if by nothing.
  Tensor total() const { return options_.is_mean() ? rows_.total : Tensor(); }

 private:
  bool is_smooth() const { return options_.label_smoothing != 0; }

  template <typename W>
  kernels::CrossEntropy<W> kernel() const {
    const W *weights = rows_.weights.defined() ? rows_.weights.const_data_ptr<W>() : nullptr;
    return {classes_, static_cast<W>(options_.soft_cap), weights, is_smooth()};
  }

  // Calls `f` for each row, on libtorch's threads if there are enough numbers.
  template <typename F>
  void for_each_row(int64_t rows, const F &f) const {
    if (rows > 1 && rows * classes_ >= 32768 && at::get_num_threads() > 1) return in_parallel(rows, f);
    for (int64_t row = 0; row < rows; ++row) f(row);
  }

  void statistics_in_loops(const Tensor &logits, int64_t begin, const Tensor &log_sums, const Tensor &target,
                           const Tensor &smoothed) const {
    with_floating(logits.scalar_type(), [&](auto *type) {
      using T = std::remove_pointer_t<decltype(type)>;
      using W = kernels::Wide<T>;
      const auto *z = logits.const_data_ptr<T>();
      const auto *index = rows_.index.const_data_ptr<int64_t>() + begin;
      auto *sums = log_sums.data_ptr<W>(), *targets = target.data_ptr<W>();
      auto *weighted = is_smooth() ? smoothed.data_ptr<W>() : nullptr;
      const auto loss = kernel<W>();
      for_each_row(logits.size(0), [&](int64_t row) {
        const auto found = kernels::row_statistics(z + row * classes_, index[row], loss);
        sums[row] = found.log_sum;
        targets[row] = found.target;
        if (weighted != nullptr) weighted[row] = found.smoothed;
      });
    });
  }

  void gradient_in_loops(const Tensor &logits, int64_t begin, const Tensor &probability, const Tensor &smoothed,
                         const Tensor &target) const {
    const Tensor factors = probability.contiguous(), targets = target.contiguous();
    const Tensor smoothings = is_smooth() ? smoothed.contiguous() : Tensor();
    with_floating(logits.scalar_type(), [&](auto *type) {
      using T = std::remove_pointer_t<decltype(type)>;
      using W = kernels::Wide<T>;
      auto *z = logits.data_ptr<T>();
      const auto *index = rows_.index.const_data_ptr<int64_t>() + begin;
      const auto *kept = rows_.kept.const_data_ptr<bool>() + begin;
      const auto *sums = log_sums_.const_data_ptr<W>() + begin;
      const auto *p = factors.const_data_ptr<W>(), *t = targets.const_data_ptr<W>();
      const auto *s = is_smooth() ? smoothings.const_data_ptr<W>() : nullptr;
      const auto loss = kernel<W>();
      for_each_row(logits.size(0), [&](int64_t row) {
        T *from = z + row * classes_;
        if (!kept[row]) return std::fill(from, from + classes_, T(0));
        const kernels::RowFactors<W> of_row{p[row], s == nullptr ? W(0) : s[row], t[row]};
        kernels::row_gradient(from, index[row], sums[row], of_row, loss);
      });
    });
  }

  // Returns the logits in the dtype of the loss, after the cap. The result may be `logits` itself.
  Tensor capped(const Tensor &logits) const {
    const Tensor wide = logits.to(wide_);
    if (options_.soft_cap == 0) return wide;
    return (wide / options_.soft_cap).tanh_().mul_(options_.soft_cap);
  }

  // Whether the kernels of a softmax take these logits and return f32: they do on CUDA, for fp16 only.
  static bool narrows_in_the_kernel(const Tensor &z) { return z.is_cuda() && z.scalar_type() == at::kHalf; }

  // How many rows are computed at once: two tensors in f32 take at most 64 MiB, and smoothed class weights half as much.
  int64_t rows_at_once() const { return std::max<int64_t>(1, (int64_t{64} << 20) / (8 * classes_)); }

  template <typename F>
  void by_parts(const Tensor &logits, const F &f) const {
    const int64_t rows = logits.size(0), step = rows_at_once();
    for (int64_t at = 0; at < rows; at += step) {
      const int64_t count = std::min(step, rows - at);
      f(logits.narrow(0, at, count), at, count);
    }
  }

  void statistics_in_operators(const Tensor &logits, int64_t begin, const Tensor &log_sums, const Tensor &target,
                               const Tensor &smoothed) const {
    by_parts(logits, [&](const Tensor &z, int64_t at, int64_t count) {
      const Tensor index = rows_.index.narrow(0, begin + at, count).unsqueeze(1);
      const bool is_plain = options_.soft_cap == 0;
      const Tensor wide = is_plain && !is_smooth() ? Tensor() : capped(z);
      const Tensor logs = is_plain && narrows_in_the_kernel(z)
                              ? at::_log_softmax(z, 1, /*half_to_float=*/true)
                              : at::log_softmax(wide.defined() ? wide : z.to(wide_), 1);
      const Tensor logit = (wide.defined() ? wide : z).gather(1, index).squeeze(1).to(wide_);
      target.narrow(0, at, count).copy_(logit);
      log_sums.narrow(0, at, count).copy_(logit - logs.gather(1, index).squeeze(1));
      if (!is_smooth()) return;
      const Tensor sum = rows_.weights.defined() ? at::mv(wide, rows_.weights) : wide.sum(1);
      smoothed.narrow(0, at, count).copy_(sum);
    });
  }

  void gradient_in_operators(const Tensor &logits, int64_t begin, const Tensor &probability, const Tensor &smoothed,
                             const Tensor &target) const {
    by_parts(logits, [&](Tensor z, int64_t at, int64_t count) {
      const auto column = [&](const Tensor &t) { return t.narrow(0, at, count).unsqueeze(1); };
      const Tensor index = rows_.index.narrow(0, begin + at, count).unsqueeze(1);
      const bool is_plain = options_.soft_cap == 0;
      const Tensor wide = is_plain ? Tensor() : capped(z);
      const Tensor p = is_plain && narrows_in_the_kernel(z) ? at::_softmax(z, 1, /*half_to_float=*/true)
                                                            : at::softmax(wide.defined() ? wide : z.to(wide_), 1);
      // The entry of the target is rounded once, like the others.
      Tensor entry = p.gather(1, index) * column(probability) - column(target);
      const Tensor empty = rows_.kept.narrow(0, begin + at, count).logical_not().unsqueeze(1);
      if (is_plain && !is_smooth()) {
        at::mul_out(z, p, column(probability));
        z.scatter_(1, index, entry.to(z.scalar_type()));
        z.masked_fill_(empty, 0);
        return;
      }
      // The tensors of all logits are overwritten from here on.
      Tensor grad = p.mul_(column(probability));
      if (is_smooth()) {
        grad.sub_(rows_.weights.defined() ? rows_.weights * column(smoothed) : column(smoothed));
        entry = entry - column(smoothed) * (rows_.weights.defined()
                                                ? rows_.weights.index_select(0, index.squeeze(1)).unsqueeze(1)
                                                : at::ones({}, p.options()));
      }
      grad.scatter_(1, index, entry);
      if (wide.defined()) grad.mul_(wide.div_(options_.soft_cap).square_().neg_().add_(1));
      z.copy_(grad.masked_fill_(empty, 0));
    });
  }

  LossOptions options_;
  int64_t classes_;
  at::ScalarType wide_;
  Rows rows_;
  Tensor losses_, log_sums_;
};

Tensor logits_of(const Tensor &hidden, const Tensor &weight, const Tensor &bias) {
  return at::linear(hidden, weight, bias).contiguous();
}

// The gradients of the hidden states, the weight and the bias; undefined where one is not wanted.
struct Gradients {
  Tensor hidden, weight, bias;
};

struct Wanted {
  bool hidden, weight, bias;
  bool any() const { return hidden || weight || bias; }
};

// Computes a loss block by block, and adds up the gradients in the dtype of the loss.
class Blocks {
 public:
  Blocks(const Tensor &hidden, const Tensor &weight, const Tensor &bias, Wanted wanted, at::ScalarType wide)
      : hidden_(hidden), weight_(weight), bias_(bias), wide_(wide), wanted_(wanted) {
    const auto numbers = hidden.options().dtype(wide);
    if (wanted.hidden) out_.hidden = at::empty(hidden.sizes(), numbers);
    if (wanted.weight) out_.weight = at::zeros(weight.sizes(), numbers);
    if (wanted.bias) out_.bias = at::zeros(bias.sizes(), numbers);
  }

  // Calls `f` with the logits of each block, which `f` overwrites with their gradient, and adds up the gradients.
  template <typename F>
  Gradients run(uint64_t max_bytes, const F &f) {
    const int64_t classes = weight_.size(0), rows = hidden_.size(0);
    const auto bytes = static_cast<uint64_t>(std::max<int64_t>(classes, 1)) * hidden_.element_size();
    const auto most = static_cast<int64_t>(std::clamp<uint64_t>(max_bytes / bytes, 1, std::max<int64_t>(rows, 1)));
    for (int64_t at = 0; at < rows; at += most) {
      const Tensor h = hidden_.narrow(0, at, std::min(most, rows - at));
      const Tensor z = logits_of(h, weight_, bias_);
      f(z, at);
      if (wanted_.hidden) out_.hidden.narrow(0, at, h.size(0)).copy_(at::mm(z, weight_));
      if (wanted_.weight) add_weight(z, h);
      if (wanted_.bias) out_.bias.add_(z.sum(0, /*keepdim=*/false, out_.bias.scalar_type()));
    }
    return std::move(out_);
  }

 private:
  void add_weight(const Tensor &z, const Tensor &h) {
    if (h.scalar_type() == wide_) {
      out_.weight.addmm_(z.t(), h);
      return;
    }
    // In parts: the product of all, and its copy in f32 on the CPU, would take as much memory as the gradient and half.
    // Devices need larger ones to be busy.
    const int64_t numbers = int64_t{1} << (h.is_cpu() ? 20 : 24);
    const int64_t classes = z.size(1), most = std::max<int64_t>(1, numbers / h.size(1));
    for (int64_t at = 0; at < classes; at += most) {
      const int64_t count = std::min(most, classes - at);
      out_.weight.narrow(0, at, count).add_(at::mm(z.narrow(1, at, count).t(), h));
    }
  }

  Tensor hidden_, weight_, bias_;
  at::ScalarType wide_;
  Wanted wanted_;
  Gradients out_;
};

// The derivative of the loss.
class LinearCrossEntropyNode final : public Node {
 public:
  LinearCrossEntropyNode(const Tensor &hidden, const Tensor &weight, const Tensor &bias, Loss loss,
                         at::ScalarType dtype, edge_list &&edges)
      : Node(std::move(edges)),
        hidden_(hidden, /*is_output=*/false),
        weight_(weight, /*is_output=*/false),
        bias_(bias, /*is_output=*/false),
        loss_(std::move(loss)),
        dtype_(dtype) {}

  std::string name() const override { return "LinearCrossEntropyBackward"; }

  // Gives the node the logits, or the gradients before any loss scale.
  void keep(Tensor logits) {
    note_kept(logits);
    logits_ = std::move(logits);
  }
  void keep(Gradients gradients) {
    for (const Tensor *gradient : {&gradients.hidden, &gradients.weight, &gradients.bias}) note_kept(*gradient);
    gradients_ = std::move(gradients);
    has_gradients_ = true;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    hidden_.reset_data();
    weight_.reset_data();
    bias_.reset_data();
    logits_.reset();
    gradients_ = {};
    has_gradients_ = false;
  }

 protected:
  variable_list apply(variable_list &&grads) override {
    const OutsideRegions own;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return variable_list(3);
    variable_list out;
    {
      const c10::NoGradGuard no_grad;
      const Tensor grad =
          grads[0].detach().to(loss_.wide()).reshape(grads[0].dim() == 0 ? at::IntArrayRef{} : at::IntArrayRef{-1});
      const Wanted wanted{task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
      Gradients found = gradients(grad, wanted);
      out = {found.hidden, found.weight, found.bias};
    }
    if (at::GradMode::is_enabled()) refuse_second_derivative(out, grads);
    return out;
  }

 private:
  Gradients gradients(const Tensor &grad, Wanted wanted) {
    // Unpacking fails if a tensor was changed in place or released.
    const Tensor saved_hidden = hidden_.unpack(), saved_weight = weight_.unpack(), saved_bias = bias_.unpack();
    if (has_gradients_) {
      const Tensor total = loss_.total(), factor = total.defined() ? grad / total : grad;
      // If all rows are ignored, their gradient is 0, not NaN.
      const Tensor finite = total.defined() ? at::where(total.eq(0), at::zeros_like(factor), factor) : factor;
      // Only a graph that is kept needs them again. If this pass fails nevertheless, the next one computes the blocks.
      has_gradients_ = torch::autograd::get_current_graph_task_keep_graph();
      Gradients found = has_gradients_ ? gradients_ : std::exchange(gradients_, {});
      for (Tensor *gradient : {&found.hidden, &found.weight, &found.bias}) {
        if (gradient->defined()) *gradient = has_gradients_ ? *gradient * finite : gradient->mul_(finite);
      }
      return found;
    }
    if (!wanted.any()) return {};
    const auto cast = [&](const Tensor &t) { return t.defined() ? t.detach().to(dtype_) : t; };
    const Tensor hidden = cast(saved_hidden), weight = cast(saved_weight), bias = cast(saved_bias);
    if (loss_.options().max_bytes > 0) {
      Blocks blocks(hidden, weight, bias, wanted, loss_.wide());
      return blocks.run(loss_.options().max_bytes,
                        [&](const Tensor &z, int64_t at) { loss_.backward(z, at, grad, /*outer=*/false); });
    }
    // The logits are used up by the first backward pass.
    Tensor z = std::exchange(logits_, Tensor());
    if (!z.defined()) z = logits_of(hidden, weight, bias);
    loss_.backward(z, 0, grad, /*outer=*/false);
    Gradients out;
    if (wanted.hidden) out.hidden = at::mm(z, weight);
    if (wanted.weight) out.weight = at::mm(z.t(), hidden);
    if (wanted.bias) out.bias = z.sum(0);
    return out;
  }

  static void refuse_second_derivative(variable_list &grads, const variable_list &outer) {
    edge_list edges;
    if (outer[0].defined()) edges.push_back(torch::autograd::impl::gradient_edge(outer[0]));
    auto error = make_node<torch::autograd::Error>(
        "the gradients of linear_cross_entropy cannot be differentiated; compute the loss with a linear layer and "
        "cross_entropy where second derivatives are needed",
        std::move(edges));
    for (auto &grad : grads) {
      if (grad.defined()) torch::autograd::impl::set_gradient_edge(grad, {error, error->add_input_metadata(grad)});
    }
  }

  SavedVariable hidden_, weight_, bias_;
  Tensor logits_;
  Gradients gradients_;
  bool has_gradients_ = false;
  Loss loss_;
  at::ScalarType dtype_;
};

// Computes the loss by the operators that it replaces, in the program's regions.
Tensor composed(const Tensor &hidden, const Tensor &weight, const Tensor &bias, const Tensor &targets,
                const LossOptions &options) {
  const int64_t classes = weight.size(0);
  const Tensor products = at::linear(hidden, weight, bias);
  const auto wide = products.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor logits = products.to(wide).reshape({-1, classes});
  if (options.soft_cap != 0) logits = (logits / options.soft_cap).tanh() * options.soft_cap;
  const Tensor labels = targets.reshape({-1});
  const Tensor weights = options.class_weights.defined() ? options.class_weights.to(wide) : Tensor();
  Tensor loss =
      at::cross_entropy_loss(logits, labels, weights, options.reduction, options.ignore_index, options.label_smoothing);
  if (options.z_loss != 0) {
    const Tensor kept = labels.ne(options.ignore_index);
    const Tensor sizes = at::where(kept, at::logsumexp(logits, 1).square() * options.z_loss, 0);
    const bool is_none = options.reduction == TAMP_LOSS_NONE;
    loss = loss + (is_none ? sizes : options.is_mean() ? sizes.sum() / kept.sum() : sizes.sum());
  }
  return options.reduction == TAMP_LOSS_NONE ? loss.reshape(targets.sizes()) : loss;
}

Tensor cross_entropy(const Tensor &hidden, const Tensor &weight, const Tensor &bias, const Tensor &targets,
                     const LossOptions &options, at::ScalarType dtype) {
  const OutsideRegions own;
  Tensor loss;
  LinearCrossEntropyNode *node = nullptr;
  NodePtr<LinearCrossEntropyNode> made;
  const bool is_recorded = at::GradMode::is_enabled() && torch::autograd::compute_requires_grad(hidden, weight, bias);
  {
    const c10::NoGradGuard no_grad;
    const Tensor h = hidden.detach().to(dtype), w = weight.detach().to(dtype);
    const Tensor b = bias.defined() ? bias.detach().to(dtype) : bias;
    const Tensor labels = targets.detach().reshape({-1});
    Loss state(labels, options, weight.size(0), dtype);
    Tensor logits;
    Gradients gradients;
    const bool in_blocks = options.max_bytes > 0;
    const bool has_gradients = is_recorded && in_blocks && options.reduction != TAMP_LOSS_NONE;
    if (in_blocks) {
      const Wanted wanted{has_gradients && hidden.requires_grad(), has_gradients && weight.requires_grad(),
                          has_gradients && bias.defined() && bias.requires_grad()};
      const Tensor one = at::ones({}, h.options().dtype(state.wide()));
      Blocks blocks(h, w, b, wanted, state.wide());
      gradients = blocks.run(options.max_bytes, [&](const Tensor &z, int64_t at) {
        state.forward(z, at);
        if (wanted.any()) state.backward(z, at, one, /*outer=*/true);
      });
      if (h.size(0) == 0) state.forward(at::empty({0, w.size(0)}, h.options()), 0);
    } else {
      logits = logits_of(h, w, b);
      state.forward(logits, 0);
    }
    loss = state.reduced(targets.sizes());
    if (!is_recorded) return loss;
#ifdef TAMP_WITH_INSIGHT
    // Reports name what the node keeps by this function.
    note_function("linear_cross_entropy", 0, static_cast<uint64_t>(-1));
#endif
    made = make_node<LinearCrossEntropyNode>(hidden, weight, bias, std::move(state), dtype,
                                             torch::autograd::collect_next_edges(hidden, weight, bias));
    node = made.get();
    if (has_gradients) {
      node->keep(std::move(gradients));
    } else if (!in_blocks) {
      node->keep(std::move(logits));
    }
  }
  torch::autograd::impl::set_gradient_edge(loss, {made, node->add_input_metadata(loss)});
  return loss;
}

// Returns the first target that is neither a class nor ignored, or -1. Only targets on the CPU are checked: others
// would make the host wait for the device.
int64_t first_out_of_range(const Tensor &targets, int64_t classes, int64_t ignored) {
  if (!targets.is_cpu()) return -1;
  const Tensor labels = targets.detach().reshape({-1}).contiguous();
  const auto *label = labels.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < labels.numel(); ++i) {
    if ((label[i] < 0 || label[i] >= classes) && label[i] != ignored) return i;
  }
  return -1;
}

}  // namespace
}  // namespace tamp

extern "C" {

int64_t tamp_targets_check(const tamp_tensor *targets, int64_t classes, int64_t ignored, char **err) noexcept {
  return tamp::guarded(err, [&] { return tamp::first_out_of_range(tamp::tensor(targets), classes, ignored); });
}

tamp_tensor *tamp_linear_cross_entropy(const tamp_tensor *hidden, const tamp_tensor *weight, const tamp_tensor *bias,
                                       const tamp_tensor *targets, const tamp_cross_entropy *options,
                                       char **err) noexcept {
  return tamp::guarded_inside_regions(err, [&]() -> tamp_tensor * {
    using at::Tensor;
    const tamp::LossOptions loss(*options);
    Tensor h = tamp::tensor(hidden), w = tamp::tensor(weight), b = bias == nullptr ? Tensor() : tamp::tensor(bias);
    if (tamp::is_emulated()) return tamp::give(tamp::composed(h, w, b, tamp::tensor(targets), loss));
    const auto cast = tamp::cast_of_linear(h, w, b);
    const auto dtype = cast.value_or(h.scalar_type());
    h = h.reshape({-1, h.size(-1)});
    if (loss.max_bytes == 0) {
      // Casts as a linear layer in the region does: through the weight cache, and with autograd's derivatives.
      h = tamp::cast_in_region(h, cast), w = tamp::cast_in_region(w, cast), b = tamp::cast_in_region(b, cast);
    }
    return tamp::give(tamp::cross_entropy(h, w, b, tamp::tensor(targets), loss, dtype));
  });
}

}  // extern "C"
