// The fused optimizers: one call for all parameters. On the CPU the loops of kernels.h, elsewhere libtorch's kernels.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunks.h"
#include "guarded.h"
#include "kernels.h"
#include "masters.h"

namespace {

using at::Tensor;
using tamp::kernels::GradientScale;

enum State { kFirst, kSecond, kThird, kStates };

// A parameter with what its update reads and writes.
struct Entry {
  const tamp_optim_options *options;
  bool first_step;
  Tensor parameter, gradient, step, states[kStates];
  tamp::Master master;

  // In which the update is computed and the state is kept.
  at::ScalarType dtype() const { return master.kind == TAMP_MASTER_NONE ? parameter.scalar_type() : at::kFloat; }
};

void check_state(const Tensor &parameter, const Tensor &state, at::ScalarType dtype) {
  TORCH_CHECK(
      state.scalar_type() == dtype && state.device() == parameter.device() && state.sizes() == parameter.sizes(),
      "the optimizer's state is ", state.scalar_type(), " ", state.sizes(), " on ", state.device(),
      " for a parameter that is ", parameter.scalar_type(), " ", parameter.sizes(), " on ", parameter.device(),
      " by now; build the optimizer after the model has its dtype and device");
}

void check_master(const Entry &e) {
  if (e.master.kind == TAMP_MASTER_NONE) return;
  const at::ScalarType dtype = e.parameter.scalar_type();
  const bool is_float = e.master.kind == TAMP_MASTER_FLOAT;
  TORCH_CHECK(dtype == at::kBFloat16 || (is_float && dtype == at::kHalf), "a parameter that is ", dtype,
              " has no such master weights; build the optimizer after the model has its dtype");
  if (e.master.tensor.defined()) check_state(e.parameter, e.master.tensor, is_float ? at::kFloat : at::kShort);
}

Entry entry(const tamp_optim_parameter &given, const tamp_optim_options *options) {
  Entry out = {options + given.options, given.first_step != 0, tamp::tensor(given.parameter), {}, {}, {}, {}};
  out.gradient = tamp::gradient(out.parameter);
  TORCH_CHECK(out.gradient.defined(), "a parameter without a gradient cannot be stepped");
  out.master = {given.masters, given.master == nullptr ? Tensor() : tamp::tensor(given.master), given.seed};
  check_master(out);
  const bool widened = out.master.kind != TAMP_MASTER_NONE && out.gradient.scalar_type() == at::kFloat;
  check_state(out.parameter, out.gradient, widened ? at::kFloat : out.parameter.scalar_type());
  TORCH_CHECK(tamp::with_floating(out.parameter.scalar_type(), [](auto *) {}), "a parameter that is ",
              out.parameter.scalar_type(), " cannot be stepped");
  TORCH_CHECK(!out.parameter.is_neg(), "a parameter that is the negative view of another tensor cannot be stepped");
  TORCH_CHECK(out.parameter.is_cpu() || out.parameter.is_non_overlapping_and_dense(),
              "a parameter with gaps in its memory can only be stepped on the CPU; make it contiguous");
  if (out.gradient.is_neg()) out.gradient = out.gradient.resolve_neg();
  if (given.step != nullptr) out.step = tamp::tensor(given.step);
  tamp_tensor *const states[kStates] = {given.first, given.second, given.third};
  for (int i = 0; i < kStates; ++i) {
    if (states[i] == nullptr) continue;
    out.states[i] = tamp::tensor(states[i]);
    check_state(out.parameter, out.states[i], out.dtype());
  }
  return out;
}

// ---- the CPU

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

void step_on_cpu(std::vector<Entry> work, const GradientScale &scale) {
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

GradientScale scale_on_cpu(const tamp_optim_scale &scale) {
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

// The kernels of a GPU read one f32 and compare it with 1.
void check_flag(const tamp_tensor *found_inf) {
  if (found_inf == nullptr) return;
  const Tensor &flag = tamp::tensor(found_inf);
  TORCH_CHECK(flag.scalar_type() == at::kFloat && flag.numel() == 1, "found_inf must be one f32, but is ",
              flag.scalar_type(), " ", flag.sizes());
}

bool is_skipped(const tamp_optim_scale &scale) {
  return scale.found_inf != nullptr && tamp::tensor(scale.found_inf).item<float>() != 0.0F;
}

// ---- other devices

// Entries that one call of libtorch takes.
struct Batch {
  const tamp_optim_options *options;
  at::Device device;
  at::ScalarType dtype;
  bool first_step;
  std::vector<Tensor> parameters, gradients, steps, states[kStates];

  bool takes(const Entry &e) const {
    return options == e.options && device == e.parameter.device() && dtype == e.parameter.scalar_type() &&
           first_step == e.first_step;
  }

  void add(const Entry &e) {
    parameters.push_back(e.parameter);
    // The kernels walk the memory of both with one index.
    const bool alike = e.gradient.strides() == e.parameter.strides();
    gradients.push_back(alike ? e.gradient : at::empty_like(e.parameter).copy_(e.gradient));
    if (e.step.defined()) steps.push_back(e.step);
    for (int i = 0; i < kStates; ++i) {
      if (e.states[i].defined()) states[i].push_back(e.states[i]);
    }
  }
};

// Puts f32 tensors in the place of parameters with masters.
tamp::StandIns stand_in(std::vector<Entry> &entries) {
  tamp::StandIns out;
  for (auto &e : entries) {
    if (e.master.kind == TAMP_MASTER_NONE) continue;
    const Tensor number = out.parameter(e.parameter, e.master, e.step);
    e.gradient = out.gradient(e.gradient, number);
    e.parameter = number;
    e.master = {};
  }
  out.fill();
  return out;
}

std::vector<Batch> batches(const std::vector<Entry> &entries) {
  std::vector<Batch> out;
  for (const auto &e : entries) {
    size_t i = 0;
    while (i < out.size() && !out[i].takes(e)) ++i;
    if (i == out.size()) {
      out.push_back({e.options, e.parameter.device(), e.parameter.scalar_type(), e.first_step, {}, {}, {}, {}});
    }
    out[i].add(e);
  }
  return out;
}

std::optional<Tensor> on_device(const tamp_tensor *t, at::Device device) {
  if (t == nullptr) return std::nullopt;
  return tamp::on_device(tamp::tensor(t), device);
}

void launch(Batch &b, const std::optional<Tensor> &grad_scale, const std::optional<Tensor> &found_inf) {
  const tamp_optim_options &o = *b.options;
  const bool maximize = (o.flags & TAMP_OPTIM_MAXIMIZE) != 0;
  const bool amsgrad = (o.flags & TAMP_OPTIM_AMSGRAD) != 0;
  switch (o.algorithm) {
    case TAMP_OPTIM_SGD:
      at::_fused_sgd_(b.parameters, b.gradients, b.states[kFirst], o.weight_decay, o.momentum, o.lr, o.dampening,
                      (o.flags & TAMP_OPTIM_NESTEROV) != 0, maximize, b.first_step, grad_scale, found_inf);
      break;
    case TAMP_OPTIM_ADAGRAD:
      at::_fused_adagrad_(b.parameters, b.gradients, b.states[kFirst], b.steps, o.lr, o.lr_decay, o.weight_decay, o.eps,
                          maximize, grad_scale, found_inf);
      break;
    case TAMP_OPTIM_ADAM:
      at::_fused_adam_(b.parameters, b.gradients, b.states[kFirst], b.states[kSecond], b.states[kThird], b.steps, o.lr,
                       o.beta1, o.beta2, o.weight_decay, o.eps, amsgrad, maximize, grad_scale, found_inf);
      break;
    default:
      at::_fused_adamw_(b.parameters, b.gradients, b.states[kFirst], b.states[kSecond], b.states[kThird], b.steps, o.lr,
                        o.beta1, o.beta2, o.weight_decay, o.eps, amsgrad, maximize, grad_scale, found_inf);
  }
}

void step_on_device(Batch &b, const tamp_optim_scale &scale) {
  auto grad_scale = on_device(scale.grad_scale, b.device);
  const auto clip = on_device(scale.clip, b.device);
  const auto found_inf = on_device(scale.found_inf, b.device);
  // The kernels divide by this one number.
  if (clip) grad_scale = (grad_scale ? *grad_scale : at::ones_like(*clip, at::kFloat)) / clip->to(at::kFloat);
  if (!b.steps.empty()) at::_foreach_add_(b.steps, 1);
  try {
    launch(b, grad_scale, found_inf);
  } catch (...) {
    if (!b.steps.empty()) at::_foreach_sub_(b.steps, 1);
    throw;
  }
  if (found_inf && !b.steps.empty()) {
    at::_foreach_sub_(b.steps, std::vector<Tensor>(b.steps.size(), found_inf->reshape({})));
  }
}

}  // namespace

extern "C" {

void tamp_optim_step(const tamp_optim_parameter *parameters, size_t count, const tamp_optim_options *options,
                     const tamp_optim_scale *scale, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    check_flag(scale->found_inf);
    std::vector<Entry> cpu, other;
    cpu.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      Entry e = entry(parameters[i], options);
      auto &list = e.parameter.is_cpu() && !tamp::cpu_is_other_device() ? cpu : other;
      list.push_back(std::move(e));
    }
    const auto stand_ins = stand_in(other);
    for (auto &batch : batches(other)) step_on_device(batch, *scale);
    stand_ins.write_back();
    if (!cpu.empty() && !is_skipped(*scale)) step_on_cpu(std::move(cpu), scale_on_cpu(*scale));
  });
}

void tamp_gradients_drop(tamp_tensor *const *parameters, size_t count, char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) {
      const Tensor &parameter = tamp::tensor(parameters[i]);
      if (tamp::gradient(parameter).defined()) parameter.mutable_grad().reset();
    }
  });
}

}  // extern "C"
