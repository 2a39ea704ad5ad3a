// The step of an optimizer on the CPU.

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunks.h"
#include "guarded.h"
#include "kernels.h"
#include "optim.h"

namespace tamp::optim {
namespace {

using at::Tensor;
using tamp::kernels::GradientScale;

// Whether one index goes over the memory of the parameter, its gradient and its state alike.
bool is_aligned(const Entry &e) {
  const auto contiguous = [](const Tensor &t) { return !t.defined() || t.is_contiguous(); };
  if (e.parameter.is_contiguous() && contiguous(e.gradient) && contiguous(e.states[kFirst]) &&
      contiguous(e.states[kSecond]) && contiguous(e.states[kThird]) && contiguous(e.master.tensor)) {
    return true;
  }
  if (!e.parameter.is_non_overlapping_and_dense()) return false;
  const auto alike = [&](const Tensor &t) { return !t.defined() || t.strides() == e.parameter.strides(); };
  return alike(e.gradient) && alike(e.states[kFirst]) && alike(e.states[kSecond]) && alike(e.states[kThird]) &&
         alike(e.master.tensor);
}

// The same entry in contiguous memory, where it is not so already.
Entry contiguous(const Entry &e) {
  Entry out = e;
  out.parameter = e.parameter.contiguous();
  out.gradient = e.gradient.contiguous();
  for (auto &state : out.states) {
    if (state.defined()) state = state.contiguous();
  }
  if (e.master.tensor.defined()) out.master.tensor = e.master.tensor.contiguous();
  return out;
}

void copy_back(const Entry &to, const Entry &from) {
  const auto copy = [](const Tensor &target, const Tensor &source) {
    if (target.defined() && !target.is_same(source)) target.copy_(source);
  };
  copy(to.parameter, from.parameter);
  copy(to.master.tensor, from.master.tensor);
  for (int i = 0; i < kStates; ++i) copy(to.states[i], from.states[i]);
}

float &step_of(const Entry &e) { return *e.step.mutable_data_ptr<float>(); }

// 1 - beta^step, remembered: most parameters share it.
class Correction {
 public:
  double operator()(double beta, double step) {
    if (beta != beta_ || step != step_) value_ = 1 - std::pow(beta_ = beta, step_ = step);
    return value_;
  }

 private:
  double beta_ = -1, step_ = -1, value_ = 0;
};

struct Corrections {
  Correction first, second;
};

// What an update takes besides memory.
struct Update {
  tamp::kernels::Adam adam;
  tamp::kernels::Sgd sgd;
  tamp::kernels::Adagrad adagrad;
};

Update update_of(const Entry &e, Corrections &corrections) {
  const tamp_optim_options &o = *e.options;
  const bool maximize = (o.flags & TAMP_OPTIM_MAXIMIZE) != 0;
  const double step = e.step.defined() ? step_of(e) + 1.0 : 1.0;
  Update out = {};
  if (o.algorithm == TAMP_OPTIM_SGD) {
    const bool nesterov = (o.flags & TAMP_OPTIM_NESTEROV) != 0;
    out.sgd = {o.lr, o.momentum, o.dampening, o.weight_decay, nesterov, maximize, e.first_step};
  } else if (o.algorithm == TAMP_OPTIM_ADAGRAD) {
    out.adagrad = {o.lr, o.lr_decay, o.eps, o.weight_decay, step, maximize};
  } else {
    const bool amsgrad = (o.flags & TAMP_OPTIM_AMSGRAD) != 0;
    const bool decoupled = o.algorithm == TAMP_OPTIM_ADAMW;
    out.adam = {o.lr,
                o.beta1,
                o.beta2,
                o.eps,
                o.weight_decay,
                corrections.first(o.beta1, step),
                corrections.second(o.beta2, step),
                amsgrad,
                maximize,
                decoupled};
  }
  return out;
}

// The memory of `t` from an element on; null for none.
template <typename T>
T *at(const Tensor &t, int64_t begin) {
  return t.defined() ? static_cast<T *>(t.data_ptr()) + begin : nullptr;
}

// A range of the state, and of the parameter and the gradient, wherever those are.
template <typename T>
tamp::kernels::Slice<T> slice(const Entry &e, T *parameter, const T *gradient, int64_t begin, int64_t n) {
  const auto state = [&](State i) { return at<T>(e.states[i], begin); };
  return {parameter, gradient, state(kFirst), state(kSecond), state(kThird), n};
}

template <typename T>
void apply(const Entry &e, const Update &update, const GradientScale &scale, const tamp::kernels::Slice<T> &x) {
  switch (e.options->algorithm) {
    case TAMP_OPTIM_SGD:
      return tamp::kernels::update(update.sgd, scale, x);
    case TAMP_OPTIM_ADAGRAD:
      return tamp::kernels::update(update.adagrad, scale, x);
    default:
      return tamp::kernels::update(update.adam, scale, x);
  }
}

// Updates a parameter in half precision in f32, in blocks that stay in the first cache.
template <typename Half>
void run_in_blocks(const Entry &e, const Update &update, const GradientScale &scale, const tamp::Chunk &chunk) {
  namespace kernels = tamp::kernels;
  constexpr int64_t kBlock = 1024;
  alignas(64) float numbers[kBlock], gradients[kBlock];
  const bool remains = e.master.kind == TAMP_MASTER_REMAINDER;
  const uint64_t seed =
      e.master.kind == TAMP_MASTER_STOCHASTIC
          ? tamp::seed_of_step(e.master.seed, static_cast<uint64_t>(*e.step.const_data_ptr<float>()) + 1)
          : 0;
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kBlock) {
    const int64_t n = std::min(kBlock, chunk.end - begin);
    Half *parameter = at<Half>(e.parameter, begin);
    int16_t *rest = remains ? at<int16_t>(e.master.tensor, begin) : nullptr;
    float *number = numbers;
    if (e.master.kind == TAMP_MASTER_FLOAT) {
      number = at<float>(e.master.tensor, begin);
    } else if constexpr (std::is_same_v<Half, c10::BFloat16>) {
      remains ? kernels::join(parameter, rest, numbers, n) : kernels::widen(parameter, numbers, n);
    }
    const float *gradient = gradients;
    if (e.gradient.scalar_type() == at::kFloat) {
      gradient = e.gradient.const_data_ptr<float>() + begin;
    } else {
      kernels::widen(e.gradient.const_data_ptr<Half>() + begin, gradients, n);
    }
    apply(e, update, scale, slice<float>(e, number, gradient, begin, n));
    if (e.master.kind == TAMP_MASTER_FLOAT) {
      kernels::narrow(number, parameter, n);
    } else if constexpr (std::is_same_v<Half, c10::BFloat16>) {
      remains ? kernels::split(numbers, parameter, rest, n)
              : kernels::round_at_random(numbers, parameter, n, seed, begin);
    }
  }
}

void run(const Entry &e, const Update &update, const GradientScale &scale, const tamp::Chunk &chunk) {
  if (e.master.kind != TAMP_MASTER_NONE) {
    const bool is_bf16 = e.parameter.scalar_type() == at::kBFloat16;
    const auto in_blocks = is_bf16 ? run_in_blocks<c10::BFloat16> : run_in_blocks<c10::Half>;
    return in_blocks(e, update, scale, chunk);
  }
  tamp::with_floating(e.parameter.scalar_type(), [&](auto *type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto *gradient = static_cast<const T *>(e.gradient.const_data_ptr()) + chunk.begin;
    const int64_t n = chunk.end - chunk.begin;
    apply(e, update, scale, slice<T>(e, at<T>(e.parameter, chunk.begin), gradient, chunk.begin, n));
  });
}

// Parallel loops only read the pointers: memory that is copied on its first write is copied here.
void materialize(const Entry &e) {
  e.parameter.mutable_data_ptr();
  if (e.master.tensor.defined()) e.master.tensor.mutable_data_ptr();
  for (const auto &state : e.states) {
    if (state.defined()) state.mutable_data_ptr();
  }
}

void bump(const Tensor &t) {
  if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

GradientScale scale_of(const tamp_optim_scale &scale) {
  GradientScale out;
  const float value = scale.grad_scale == nullptr ? 1.0F : tamp::tensor(scale.grad_scale).item<float>();
  if (scale.clip == nullptr) {
    out.divisor = value;
  } else {
    out.factor = static_cast<float>(1.0 / static_cast<double>(value));
    out.clip = tamp::tensor(scale.clip).item<double>();
  }
  return out;
}

}  // namespace

void step_on_cpu(std::vector<Entry> work, const tamp_optim_scale &given) {
  const GradientScale scale = scale_of(given);
  std::vector<std::pair<size_t, Entry>> originals;  // of those whose memory is not in one order
  std::vector<int64_t> sizes;
  std::vector<Update> updates;
  Corrections corrections;
  sizes.reserve(work.size());
  updates.reserve(work.size());
  for (size_t i = 0; i < work.size(); ++i) {
    if (!is_aligned(work[i])) {
      originals.emplace_back(i, work[i]);
      work[i] = contiguous(work[i]);
      // What cannot be copied back is found out here, before any number changes.
      copy_back(originals.back().second, work[i]);
    }
    materialize(work[i]);
    sizes.push_back(work[i].parameter.numel());
    updates.push_back(update_of(work[i], corrections));
  }
  const auto parts = tamp::chunks(sizes);
  tamp::for_each(parts, tamp::From::kEnd, [&](int64_t i) {
    const tamp::Chunk &chunk = parts[static_cast<size_t>(i)];
    run(work[chunk.tensor], updates[chunk.tensor], scale, chunk);
  });
  for (const auto &[i, original] : originals) copy_back(original, work[i]);
  for (const auto &e : work) {
    if (e.step.defined()) step_of(e) += 1;
    bump(e.parameter);
    bump(e.master.tensor);
    for (const auto &state : e.states) bump(state);
  }
}

}  // namespace tamp::optim
