// The step of the fused optimizers, in one call for all parameters.

#include "optim/optim.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "border/guarded.h"
#include "gradients/gradients.h"
#include "gradients/parallel_chunks.h"
#include "gradients/storage.h"

namespace {

using at::Tensor;
using tamp::kExpAvg;
using tamp::kExpAvgSq;
using tamp::kExponents;
using tamp::kStates;
using tamp::optim::Entry;

bool is_on_cpu(const Tensor &t) { return t.is_cpu() && !tamp::cpu_is_other_device(); }

void check_state(const Tensor &parameter, const Tensor &state, at::ScalarType dtype) {
  TORCH_CHECK(
      state.scalar_type() == dtype && state.device() == parameter.device() && state.sizes() == parameter.sizes(),
      "the optimizer's state is ", state.scalar_type(), " ", state.sizes(), " on ", state.device(),
      " for a parameter that is ", parameter.scalar_type(), " ", parameter.sizes(), " on ", parameter.device(),
      " by now; build the optimizer after the model has its dtype and device");
}

// Checks a tensor that a loop will write to, or libtorch will copy back to. All of them are checked before the first
// one changes.
void check_memory(const Tensor &t, const char *what) {
  TORCH_CHECK(tamp::has_own_numbers(t), what,
              " is a negative view, a zero without memory or a nested tensor, which "
              "cannot be stepped; clone it");
  TORCH_CHECK(!tamp::overlaps(t), what,
              " has elements that share memory (an expanded tensor), which a step would "
              "change more than once; copy it first");
}

void check_step(const Entry &e) {
  if (!e.step.defined()) return;
  const at::ScalarType dtype = e.is_low_bit() ? at::kLong : at::kFloat;
  TORCH_CHECK(e.step.scalar_type() == dtype && e.step.numel() == 1 && e.step.device() == e.parameter.device() &&
                  e.step.layout() == at::kStrided && (!e.step.is_cpu() || tamp::is_plain_memory(e.step)),
              "the number of steps must be one ", dtype, " on ", e.parameter.device(), ", but is ",
              e.step.scalar_type(), " with ", e.step.numel(), " elements on ", e.step.device(),
              "; load a state to repair it");
}

void check_master(const Entry &e) {
  if (e.master.kind == TAMP_MASTER_NONE) return;
  const at::ScalarType dtype = e.parameter.scalar_type();
  const bool is_float = e.master.kind == TAMP_MASTER_FLOAT;
  TORCH_CHECK(dtype == at::kBFloat16 || (is_float && dtype == at::kHalf), "a parameter that is ", dtype,
              " has no such master weights; build the optimizer after the model has its dtype");
  if (!e.master.tensor.defined()) return;
  check_memory(e.master.tensor, "a master weight");
  check_state(e.parameter, e.master.tensor, is_float ? at::kFloat : at::kShort);
}

// Checks that a parameter and its state have the same layout, because the kernels of devices other than the CPU go over
// their memory with one index.
void check_layout(const Entry &e) {
  if (is_on_cpu(e.parameter)) return;
  TORCH_CHECK(e.parameter.is_non_overlapping_and_dense(),
              "a parameter with gaps in its memory can only be stepped on the CPU; make it contiguous");
  const auto check = [&](const Tensor &state) {
    TORCH_CHECK(!state.defined() || tamp::optim::are_alike(state, e.parameter), "the optimizer's state has strides ",
                state.strides(), " for a parameter with strides ", e.parameter.strides(),
                " by now; build the optimizer after the model has its memory format");
  };
  check(e.master.tensor);
  if (e.is_low_bit()) return;
  for (const auto &state : e.states) check(state);
}

// Whether a state is of another shape than its parameter.
bool is_factor(uint8_t algorithm, int place) {
  return algorithm == TAMP_OPTIM_ADAFACTOR || (algorithm == TAMP_OPTIM_NADAM && place == tamp::kMuProduct);
}

// Checks such a state, which libtorch's operations read and copy to.
void check_factor(const Entry &e, int place, const Tensor &state) {
  check_memory(state, "the optimizer's state");
  const bool is_one = e.options->algorithm == TAMP_OPTIM_NADAM, is_whole = place == tamp::kVariance;
  auto sizes = is_one ? std::vector<int64_t>() : e.parameter.sizes().vec();
  const bool has_matrices = sizes.size() >= 2;
  if (!is_one && !is_whole && has_matrices) sizes[sizes.size() - (place == tamp::kRowVar ? 1 : 2)] = 1;
  const at::ScalarType dtype = is_one ? at::kFloat : e.dtype();
  TORCH_CHECK((is_one || is_whole != has_matrices) && state.scalar_type() == dtype &&
                  state.device() == e.parameter.device() && state.sizes() == sizes &&
                  state.is_non_overlapping_and_dense(),
              "the optimizer's state is ", state.scalar_type(), " ", state.sizes(), " on ", state.device(),
              " for a parameter that is ", e.parameter.scalar_type(), " ", e.parameter.sizes(), " on ",
              e.parameter.device(), " by now; build the optimizer after the model has its dtype and device");
}

// Checks low-bit moments, which are in the order of the parameter's elements. Muon has one, its momentum.
void check_moments(const Entry &e) {
  TORCH_CHECK(e.dtype() == at::kFloat && e.master.kind != TAMP_MASTER_STOCHASTIC, "a parameter that is ",
              e.parameter.scalar_type(), " has no low-bit moments; build the optimizer after the model has its dtype");
  const bool has_codes = e.kept_as == TAMP_STATES_EIGHT_BIT;
  const bool is_muon = e.options->algorithm == TAMP_OPTIM_MUON;
  TORCH_CHECK(!is_muon || !has_codes, "Muon has no 8-bit moments");
  check_state(e.parameter, e.states[kExpAvg], has_codes ? at::kChar : at::kBFloat16);
  if (!is_muon) check_state(e.parameter, e.states[kExpAvgSq], has_codes ? at::kByte : at::kBFloat16);
  for (const auto &state : e.states) {
    if (!state.defined()) continue;
    check_memory(state, "the optimizer's state");
    TORCH_CHECK(state.is_contiguous(), "low-bit moments are contiguous; load a state to repair them");
  }
  const Tensor &exponents = e.states[kExponents];
  TORCH_CHECK(!has_codes || (exponents.scalar_type() == at::kByte && exponents.device() == e.parameter.device() &&
                             exponents.numel() == tamp::kernels::code_blocks(e.parameter.numel())),
              "8-bit moments have a u8 for each 32 numbers; load a state to repair them");
}

// Fills an empty entry.
void fill(Entry &out, const tamp_optim_parameter &given, const tamp_optim_options *options) {
  out.options = options + given.options;
  out.first_step = given.first_step != 0;
  out.many_steps = given.many_steps != 0;
  out.parameter = tamp::tensor(given.parameter);
  check_memory(out.parameter, "a parameter");
  const bool has_rates = tamp::optim::has_device_rates(*out.options);
  TORCH_CHECK(!has_rates || tamp::tensor(out.options->rates).device() == out.parameter.device(),
              "a parameter has been moved to ", out.parameter.device(), " since the optimizer was captured");
  TORCH_CHECK(tamp::gradient(out.parameter).defined(), "a parameter without a gradient cannot be stepped");
  out.gradient = tamp::with_own_numbers(tamp::gradient(out.parameter));
  out.master = {given.masters, given.master == nullptr ? Tensor() : tamp::tensor(given.master), given.seed};
  check_master(out);
  const bool widened = out.master.kind != TAMP_MASTER_NONE && out.gradient.scalar_type() == at::kFloat;
  check_state(out.parameter, out.gradient, widened ? at::kFloat : out.parameter.scalar_type());
  TORCH_CHECK(out.options->algorithm != TAMP_OPTIM_MUON || out.parameter.dim() == 2,
              "Muon steps matrices, but the parameter has ", out.parameter.dim(), " dimensions");
  TORCH_CHECK(tamp::with_floating(out.parameter.scalar_type(), [](auto *) {}), "a parameter that is ",
              out.parameter.scalar_type(), " cannot be stepped");
  if (given.step != nullptr) out.step = tamp::tensor(given.step);
  out.kept_as = given.kept_as;
  const bool has_factors = out.options->algorithm == TAMP_OPTIM_NADAM || out.options->algorithm == TAMP_OPTIM_ADAFACTOR;
  if (has_factors) out.factors = std::make_shared<tamp::optim::Factors>();
  for (int i = 0; i < kStates; ++i) {
    if (given.states[i] == nullptr) continue;
    if (is_factor(out.options->algorithm, i)) {
      out.factors->states[i] = tamp::tensor(given.states[i]);
      check_factor(out, i, out.factors->states[i]);
      continue;
    }
    out.states[i] = tamp::tensor(given.states[i]);
    if (out.is_low_bit()) continue;
    check_memory(out.states[i], "the optimizer's state");
    check_state(out.parameter, out.states[i], out.dtype());
  }
  if (out.is_low_bit()) check_moments(out);
  check_step(out);
  check_layout(out);
}

// Checks that an argument of a step is one number, which the kernels of a GPU read as f32.
void check_number(const tamp_tensor *given, const char *name, bool may_have_other_dtype) {
  if (given == nullptr) return;
  const Tensor &number = tamp::tensor(given);
  const bool fits = number.defined() && tamp::has_own_numbers(number) && number.numel() == 1 && !number.is_meta();
  const bool has_dtype =
      fits && (may_have_other_dtype ? at::isFloatingType(number.scalar_type()) : number.scalar_type() == at::kFloat);
  if (has_dtype) return;
  TORCH_CHECK(number.defined(), name, " must be one f32, but is undefined");
  TORCH_CHECK(false, name, " must be one f32 in memory of its own, but is ", number.scalar_type(), " with ",
              number.numel(), " elements on ", number.device(), "; convert it with `to_kind`");
}

// Checks the arguments of a step before the first part of it is taken.
void check_scale(const tamp_optim_scale &scale) {
  check_number(scale.grad_scale, "grad_scale", false);
  check_number(scale.clip, "the clip factor", true);
  check_number(scale.found_inf, "found_inf", false);
}

// Whether a parameter is not a leaf by now, so that backward leaves no gradient in it.
bool is_never_trained(const Tensor &parameter) { return parameter.requires_grad() && !parameter.is_leaf(); }

// Returns what a step will do with a parameter: TAMP_STEP_TAKEN, or the reason why it is not taken.
uint8_t answer(const tamp_optim_parameter &given) {
  if (given.elsewhere != 0) return TAMP_STEP_LEFT_OUT;
  const Tensor &parameter = tamp::tensor(given.parameter);
  const tamp_gradient gradient = tamp::inspect(parameter);
  if (gradient.gradient == 0) return is_never_trained(parameter) ? TAMP_STEP_REFUSED : TAMP_STEP_LEFT_OUT;
  if ((gradient.flags & TAMP_GRADIENT_REQUIRES_GRAD) == 0) return TAMP_STEP_LEFT_OUT;
  const bool is_strided = (gradient.flags & TAMP_GRADIENT_STRIDED) != 0;
  if (!is_strided || (gradient.flags & TAMP_GRADIENT_OTHER_SHAPE) != 0) return TAMP_STEP_REFUSED;
  const bool widened = given.masters != TAMP_MASTER_NONE && gradient.dtype == static_cast<int8_t>(at::kFloat);
  if ((gradient.flags & TAMP_GRADIENT_OTHER_DTYPE) != 0 && !widened) return TAMP_STEP_REFUSED;
  if (given.master != nullptr && !tamp::is_as_stamped(parameter, *given.stamp)) return TAMP_STEP_STALE;
  return given.complete != 0 ? TAMP_STEP_TAKEN : TAMP_STEP_INCOMPLETE;
}

// Refuses parameters that share memory with another one, since a step would change that twice, on two threads at once.
void refuse_overlapping(const tamp_optim_parameter *parameters, size_t count, uint8_t *answers) {
  std::vector<const Tensor *> shared;
  std::vector<size_t> places;
  for (size_t i = 0; i < count; ++i) {
    const Tensor &parameter = tamp::tensor(parameters[i].parameter);
    if (parameters[i].elsewhere != 0 || !tamp::is_shared(parameter)) continue;
    shared.push_back(&parameter);
    places.push_back(i);
  }
  for (const auto &[one, other] : tamp::overlapping(shared)) answers[places[other]] = TAMP_STEP_REFUSED;
}

bool is_skipped(const tamp_optim_scale &scale) {
  return scale.found_inf != nullptr && tamp::tensor(scale.found_inf).item<float>() != 0.0F;
}

}  // namespace

bool tamp::optim::has_device_rates(const tamp_optim_options &o) {
  return o.rates != nullptr && !tamp::planted("host_rate");
}

Tensor tamp::optim::device_rate(const tamp_optim_options &o) { return tamp::tensor(o.rates).select(0, 0); }

Tensor tamp::optim::device_keep(const tamp_optim_options &o) { return tamp::tensor(o.rates).select(0, 1); }

bool tamp::optim::are_alike(const Tensor &one, const Tensor &other) {
  if (one.sizes() != other.sizes()) return false;
  for (int64_t i = 0; i < one.dim(); ++i) {
    if (one.size(i) != 1 && one.stride(i) != other.stride(i)) return false;
  }
  return true;
}

extern "C" {

void tamp_optim_step(const tamp_optim_parameter *parameters, size_t count, const tamp_optim_options *options,
                     const tamp_optim_scale *scale, uint8_t *answers, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    std::transform(parameters, parameters + count, answers, answer);
    refuse_overlapping(parameters, count, answers);
    const auto stops = [](uint8_t answer) { return answer != TAMP_STEP_TAKEN && answer != TAMP_STEP_LEFT_OUT; };
    if (std::any_of(answers, answers + count, stops)) return;
    check_scale(*scale);
    std::vector<Entry> cpu, other;
    cpu.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      if (answers[i] != TAMP_STEP_TAKEN) continue;
      auto &entries = is_on_cpu(tamp::tensor(parameters[i].parameter)) ? cpu : other;
      fill(entries.emplace_back(), parameters[i], options);
    }
    // The CPU comes first, because only its part can still fail, and then it has changed nothing.
    const tamp::optim::DeviceStep devices(other, *scale);
    if (!cpu.empty() && !is_skipped(*scale)) tamp::optim::step_on_cpu(std::move(cpu), *scale);
    devices.run();
    for (size_t i = 0; i < count; ++i) {
      const tamp_optim_parameter &given = parameters[i];
      if (answers[i] == TAMP_STEP_TAKEN && given.master != nullptr) {
        tamp::take_stamp(tamp::tensor(given.parameter), *given.stamp);
      }
    }
  });
}

}  // extern "C"
