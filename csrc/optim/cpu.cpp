// The step of an optimizer on the CPU.

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "border/guarded.h"
#include "gradients/parallel_chunks.h"
#include "gradients/storage.h"
#include "kernels/kernels.h"
#include "optim/optim.h"
#include "optim/whole.h"

namespace tamp::optim {
namespace {

using at::Tensor;
using tamp::kernels::GradientScale;

// Whether one index goes over the memory of the parameter, its gradient, its state and its master.
bool is_aligned(const Entry &e) {
  const auto all = [&](const auto &fits) {
    const auto fits_or_missing = [&](const Tensor &t) { return !t.defined() || fits(t); };
    return fits(e.gradient) && std::all_of(std::begin(e.states), std::end(e.states), fits_or_missing) &&
           fits_or_missing(e.master.tensor);
  };
  if (e.parameter.is_contiguous() && all([](const Tensor &t) { return t.is_contiguous(); })) return true;
  if (!e.parameter.is_non_overlapping_and_dense()) return false;
  return all([&](const Tensor &t) { return t.strides() == e.parameter.strides(); });
}

// Returns the entry in contiguous memory, with copies of the tensors that are not contiguous.
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

// The number of a step with low-bit moments, of which its dither needs the lower 32 bits.
uint64_t exact_step_of(const Entry &e) { return static_cast<uint64_t>(*e.step.const_data_ptr<int64_t>()) + 1; }

// The number of steps, including the one that is being taken.
double next_step_of(const Entry &e) {
  if (e.is_low_bit()) return static_cast<double>(static_cast<int64_t>(exact_step_of(e)));
  return tamp::next_step(*e.step.const_data_ptr<float>(), e.master.kind);
}

NAdamNumbers nadam_numbers_of(const Entry &e) {
  return nadam_numbers(*e.options, next_step_of(e), *e.factors->states[kMuProduct].const_data_ptr<float>());
}

void count_step(const Entry &e) {
  if (!e.step.defined()) return;
  if (e.options->algorithm == TAMP_OPTIM_NADAM) {
    *e.factors->states[kMuProduct].mutable_data_ptr<float>() = nadam_numbers_of(e).mu_product;
  }
  if (e.is_low_bit()) {
    *e.step.mutable_data_ptr<int64_t>() = static_cast<int64_t>(exact_step_of(e));
  } else {
    *e.step.mutable_data_ptr<float>() = static_cast<float>(next_step_of(e));
  }
}

// Computes 1 - beta^step, and remembers the last one, since most parameters share it.
class Correction {
 public:
  double operator()(double beta, double step) {
    if (beta != beta_ || step != step_) value_ = 1 - std::pow(beta_ = beta, step_ = step);
    return value_;
  }

 private:
  double beta_ = -1, step_ = -1, value_ = 0;
};

// What a step with low-bit moments takes. It has tables of the dither, which parameters of Adam and AdamW share.
using LowBit = std::shared_ptr<const tamp::kernels::LowBit>;
using LowBitMuon = std::shared_ptr<const tamp::kernels::LowBitMuon>;

struct Corrections {
  Correction beta1, beta2;
  LowBit low_bit{};
  // What `low_bit` was made of.
  const tamp_optim_options *options = nullptr;
  uint64_t step = 0;
  uint8_t kept_as = TAMP_STATES_PLAIN;
};

// What an update takes besides memory: the options of its algorithm.
using Update = std::variant<tamp::kernels::Adam, tamp::kernels::Sgd, tamp::kernels::Adagrad, tamp::kernels::RmsProp,
                            tamp::kernels::Lion, tamp::kernels::NAdam, tamp::kernels::Adafactor, tamp::kernels::Muon,
                            LowBit, LowBitMuon>;

Update low_bit_of(const Entry &e, const tamp::kernels::Adam &adam, Corrections &last) {
  const uint64_t step = exact_step_of(e);
  if (last.low_bit == nullptr || last.options != e.options || last.step != step || last.kept_as != e.kept_as) {
    const int width = e.kept_as == TAMP_STATES_EIGHT_BIT ? 8 : 16;
    last.low_bit = std::make_shared<tamp::kernels::LowBit>(adam, step, width);
    last.options = e.options;
    last.step = step;
    last.kept_as = e.kept_as;
  }
  return last.low_bit;
}

Update update_of(const Entry &e, Corrections &corrections) {
  const tamp_optim_options &o = *e.options;
  const bool maximize = (o.flags & TAMP_OPTIM_MAXIMIZE) != 0;
  const double step = e.step.defined() ? next_step_of(e) : 1.0;
  switch (o.algorithm) {
    case TAMP_OPTIM_SGD: {
      const bool nesterov = (o.flags & TAMP_OPTIM_NESTEROV) != 0;
      return tamp::kernels::Sgd{o.lr, o.momentum, o.dampening, o.weight_decay, nesterov, maximize, e.first_step};
    }
    case TAMP_OPTIM_ADAGRAD:
      return tamp::kernels::Adagrad{o.lr, o.lr_decay, o.eps, o.weight_decay, step, maximize};
    case TAMP_OPTIM_RMSPROP: {
      const bool centered = (o.flags & TAMP_OPTIM_CENTERED) != 0;
      return tamp::kernels::RmsProp{o.lr, o.alpha, o.eps, o.weight_decay, o.momentum, centered, maximize};
    }
    case TAMP_OPTIM_LION:
      return tamp::kernels::Lion{o.lr, o.beta1, o.beta2, o.weight_decay, maximize};
    case TAMP_OPTIM_NADAM: {
      const bool decoupled = (o.flags & TAMP_OPTIM_DECOUPLED_WEIGHT_DECAY) != 0;
      const NAdamNumbers numbers = nadam_numbers_of(e);
      const double keep = decoupled ? 1 - o.lr * o.weight_decay : 1;
      return tamp::kernels::NAdam{o.beta1,
                                  o.beta2,
                                  o.eps,
                                  o.weight_decay,
                                  keep,
                                  numbers.correction2,
                                  numbers.along_gradient,
                                  numbers.along_exp_avg,
                                  decoupled,
                                  maximize};
    }
    case TAMP_OPTIM_ADAFACTOR: {
      const Tensor &rate = e.factors->coefficients[0];
      return tamp::kernels::Adafactor{1 - o.lr * o.weight_decay, rate.defined() ? rate.item<double>() : 0};
    }
    case TAMP_OPTIM_MUON: {
      const tamp::kernels::Muon muon = {o.lr, e.rate, o.momentum, o.weight_decay};
      if (!e.is_low_bit()) return muon;
      return std::make_shared<const tamp::kernels::LowBitMuon>(muon, exact_step_of(e));
    }
    default: {
      tamp::kernels::Adam adam = {};
      adam.lr = o.lr;
      adam.beta1 = o.beta1;
      adam.beta2 = o.beta2;
      adam.eps = o.eps;
      adam.weight_decay = o.weight_decay;
      adam.correction1 = corrections.beta1(o.beta1, step);
      adam.correction2 = corrections.beta2(o.beta2, step);
      adam.amsgrad = (o.flags & TAMP_OPTIM_AMSGRAD) != 0;
      adam.maximize = maximize;
      adam.decoupled = o.algorithm == TAMP_OPTIM_ADAMW;
      return e.is_low_bit() ? low_bit_of(e, adam, corrections) : adam;
    }
  }
}

// The memory of an entry's tensors, or null for an undefined one.
struct Memory {
  void *parameter, *master, *states[kStates];
  const void *gradient, *direction;
  int64_t direction_size;  // of an element
};

// Returns the memory of the tensors, which the loops only read and write: copy-on-write memory must not be copied inside
// a parallel loop.
Memory memory_of(const Entry &e) {
  const auto memory = [](const Tensor &t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
  const int64_t direction_size = e.direction.defined() ? e.direction.element_size() : 0;
  Memory out = {memory(e.parameter),         memory(e.master.tensor), {},
                e.gradient.const_data_ptr(), memory(e.direction),     direction_size};
  std::transform(std::begin(e.states), std::end(e.states), std::begin(out.states), memory);
  return out;
}

// The update of one parameter.
struct Task {
  const Entry &entry;
  Memory memory;
  Update update;
};

// The memory from element `begin` on, or null.
template <typename T>
T *from(void *memory, int64_t begin) {
  return memory == nullptr ? nullptr : static_cast<T *>(memory) + begin;
}

template <typename T>
const T *from(const void *memory, int64_t begin) {
  return memory == nullptr ? nullptr : static_cast<const T *>(memory) + begin;
}

// `n` elements from `begin` on. The parameter's numbers and the gradient may be in buffers instead of their tensors.
template <typename T>
tamp::kernels::Slice<T> slice(const Memory &memory, T *parameter, const T *gradient, int64_t begin, int64_t n) {
  tamp::kernels::Slice<T> out = {parameter, gradient, {}, n};
  for (int i = 0; i < kStates; ++i) out.states[i] = from<T>(memory.states[i], begin);
  out.direction = from<char>(memory.direction, begin * memory.direction_size);
  return out;
}

void step_low_bit(const Task &task, const tamp::kernels::LowBitMuon &options, const GradientScale &scale,
                  float *parameter, const float *gradient, int64_t begin, int64_t n) {
  auto *buffer = from<c10::BFloat16>(task.memory.states[kMomentumBuffer], begin);
  const auto *direction = from<c10::BFloat16>(task.memory.direction, begin);
  tamp::kernels::update(options, scale, {parameter, gradient, buffer, direction, n});
}

// Updates with low-bit moments.
void step_low_bit(const Task &task, const tamp::kernels::LowBit &options, const GradientScale &scale, float *parameter,
                  const float *gradient, int64_t begin, int64_t n) {
  const auto &states = task.memory.states;
  if (task.entry.kept_as == TAMP_STATES_BFLOAT16) {
    auto *exp_avg = from<c10::BFloat16>(states[kExpAvg], begin);
    auto *exp_avg_sq = from<c10::BFloat16>(states[kExpAvgSq], begin);
    return tamp::kernels::update(options, scale, {parameter, gradient, exp_avg, exp_avg_sq, n});
  }
  auto *exp_avg = from<int8_t>(states[kExpAvg], begin);
  auto *exp_avg_sq = from<uint8_t>(states[kExpAvgSq], begin);
  auto *exponents = from<uint8_t>(states[kExponents], begin / tamp::kernels::kCodeBlock);
  tamp::kernels::update(options, scale, {parameter, gradient, exp_avg, exp_avg_sq, exponents, n});
}

template <typename T>
void apply(const Task &task, const GradientScale &scale, T *parameter, const T *gradient, int64_t begin, int64_t n) {
  const auto step = [&](const auto &options) {
    using Options = std::decay_t<decltype(options)>;
    if constexpr (!std::is_same_v<Options, LowBit> && !std::is_same_v<Options, LowBitMuon>) {
      tamp::kernels::update(options, scale, slice<T>(task.memory, parameter, gradient, begin, n));
    } else if constexpr (std::is_same_v<T, float>) {
      step_low_bit(task, *options, scale, parameter, gradient, begin, n);
    }
  };
  std::visit(step, task.update);
}

// Updates a half-precision parameter in f32, in blocks that stay in the first-level cache.
template <typename Half>
void run_in_blocks(const Task &task, const GradientScale &scale, const tamp::Chunk &chunk) {
  namespace kernels = tamp::kernels;
  constexpr int64_t kBlock = 256;
  alignas(64) float numbers[kBlock], gradients[kBlock];
  const auto &[e, memory, update] = task;
  const bool remains = e.master.kind == TAMP_MASTER_REMAINDER;
  const bool is_random = e.master.kind == TAMP_MASTER_STOCHASTIC;
  const uint64_t seed = is_random ? tamp::seed_of_step(e.master.seed, *e.step.const_data_ptr<float>()) : 0;
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kBlock) {
    const int64_t n = std::min(kBlock, chunk.end - begin);
    Half *parameter = from<Half>(memory.parameter, begin);
    int16_t *rest = remains ? from<int16_t>(memory.master, begin) : nullptr;
    float *number = numbers;
    if (e.master.kind == TAMP_MASTER_FLOAT) {
      number = from<float>(memory.master, begin);
    } else if constexpr (std::is_same_v<Half, c10::BFloat16>) {
      remains ? kernels::join(parameter, rest, numbers, n) : kernels::widen(parameter, numbers, n);
    }
    const float *gradient = gradients;
    if (e.gradient.scalar_type() == at::kFloat) {
      gradient = from<float>(memory.gradient, begin);
    } else {
      kernels::widen(from<Half>(memory.gradient, begin), gradients, n);
    }
    apply<float>(task, scale, number, gradient, begin, n);
    if (e.master.kind == TAMP_MASTER_FLOAT) {
      kernels::narrow(number, parameter, n);
    } else if constexpr (std::is_same_v<Half, c10::BFloat16>) {
      remains ? kernels::split(numbers, parameter, rest, n)
              : kernels::round_at_random(numbers, parameter, n, seed, begin);
    }
  }
}

void run(const Task &task, const GradientScale &scale, const tamp::Chunk &chunk) {
  const at::ScalarType dtype = task.entry.parameter.scalar_type();
  if (task.entry.master.kind != TAMP_MASTER_NONE) {
    const auto in_blocks = dtype == at::kBFloat16 ? run_in_blocks<c10::BFloat16> : run_in_blocks<c10::Half>;
    return in_blocks(task, scale, chunk);
  }
  tamp::with_floating(dtype, [&](auto *type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto [begin, n] = std::pair(chunk.begin, chunk.end - chunk.begin);
    apply<T>(task, scale, from<T>(task.memory.parameter, begin), from<T>(task.memory.gradient, begin), begin, n);
  });
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

// The same for libtorch's operations.
Unscaling unscaling_of(const GradientScale &scale) {
  Unscaling out;
  const float inverse = scale.divisor == 1 ? scale.factor : tamp::kernels::reciprocal(scale.divisor);
  if (inverse != 1) out.inverse = at::scalar_tensor(inverse, at::kFloat);
  if (scale.clip != 1) out.clip = at::scalar_tensor(scale.clip, at::kDouble);
  return out;
}

// Gives the states of another shape their values after the step.
void write(const Factors &factors) {
  for (int i = 0; i < kStates; ++i) {
    if (factors.renewed[i].defined()) factors.states[i].copy_(factors.renewed[i]);
    tamp::bump_version(factors.states[i]);
  }
}

}  // namespace

void step_on_cpu(std::vector<Entry> work, const tamp_optim_scale &given) {
  const GradientScale scale = scale_of(given);
  const Unscaling unscaling = unscaling_of(scale);
  std::vector<std::pair<size_t, Entry>> originals;  // the entries that are not aligned, with their places in `work`
  std::vector<int64_t> sizes;
  std::vector<Task> tasks;
  Corrections corrections;
  sizes.reserve(work.size());
  tasks.reserve(work.size());
  for (size_t i = 0; i < work.size(); ++i) {
    if (!is_aligned(work[i])) {
      originals.emplace_back(i, work[i]);
      work[i] = contiguous(work[i]);
      // This copies the same numbers back, so that a tensor that cannot be copied to fails before any number changes.
      copy_back(originals.back().second, work[i]);
    }
  }
  orthogonalize(work, unscaling, /*is_skipped=*/false);
  find_directions(work, unscaling);
  for (const auto &e : work) {
    for (int i = 0; e.factors && i < kStates; ++i) tamp::end_lazy_copy(e.factors->states[i]);
    sizes.push_back(e.parameter.numel());
    tasks.push_back({e, memory_of(e), update_of(e, corrections)});
  }
  const auto parts = tamp::chunks(sizes);
  tamp::for_each(parts, tamp::From::kEnd, [&](int64_t i) {
    const tamp::Chunk &chunk = parts[static_cast<size_t>(i)];
    run(tasks[chunk.tensor], scale, chunk);
  });
  for (const auto &[i, original] : originals) copy_back(original, work[i]);
  for (const auto &e : work) {
    count_step(e);
    if (e.factors) write(*e.factors);
    tamp::bump_version(e.parameter);
    tamp::bump_version(e.master.tensor);
    for (const auto &state : e.states) tamp::bump_version(state);
  }
}

}  // namespace tamp::optim
