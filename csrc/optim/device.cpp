// The step of an optimizer on devices other than the CPU, with libtorch's fused kernels where it has them.

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "border/groups.h"
#include "border/guarded.h"
#include "gradients/foreach.h"
#include "gradients/storage.h"
#include "optim/composed.h"
#include "optim/launch_groups.h"
#include "optim/low_bit.h"
#include "optim/optim.h"
#include "optim/scratch_parameters.h"

namespace tamp::optim {
namespace {

using at::Tensor;

std::optional<Tensor> on_device(const tamp_tensor *t, at::Device device) {
  if (t == nullptr) return std::nullopt;
  return tamp::on_device(tamp::tensor(t), device);
}

// Launches libtorch's kernel. The learning rate is a number, or an f32 on the device.
template <typename Rate>
void launch_with(const Rate &lr, const Batch &b, const std::optional<Tensor> &grad_scale,
                 const std::optional<Tensor> &found_inf) {
  const tamp_optim_options &o = *b.options;
  const bool maximize = (o.flags & TAMP_OPTIM_MAXIMIZE) != 0;
  const bool amsgrad = (o.flags & TAMP_OPTIM_AMSGRAD) != 0;
  switch (o.algorithm) {
    case TAMP_OPTIM_SGD:
      at::_fused_sgd_(b.parameters, b.gradients, b.states[kMomentumBuffer], o.weight_decay, o.momentum, lr, o.dampening,
                      (o.flags & TAMP_OPTIM_NESTEROV) != 0, maximize, b.first_step, grad_scale, found_inf);
      break;
    case TAMP_OPTIM_ADAGRAD:
      at::_fused_adagrad_(b.parameters, b.gradients, b.states[kSum], b.steps, lr, o.lr_decay, o.weight_decay, o.eps,
                          maximize, grad_scale, found_inf);
      break;
    case TAMP_OPTIM_ADAM:
      at::_fused_adam_(b.parameters, b.gradients, b.states[kExpAvg], b.states[kExpAvgSq], b.states[kMaxExpAvgSq],
                       b.steps, lr, o.beta1, o.beta2, o.weight_decay, o.eps, amsgrad, maximize, grad_scale, found_inf);
      break;
    default:
      at::_fused_adamw_(b.parameters, b.gradients, b.states[kExpAvg], b.states[kExpAvgSq], b.states[kMaxExpAvgSq],
                        b.steps, lr, o.beta1, o.beta2, o.weight_decay, o.eps, amsgrad, maximize, grad_scale, found_inf);
  }
}

void launch(const Batch &b, const std::optional<Tensor> &grad_scale, const std::optional<Tensor> &found_inf) {
  if (has_device_rates(*b.options)) {
    launch_with(device_rate(*b.options), b, grad_scale, found_inf);
  } else {
    launch_with(b.options->lr, b, grad_scale, found_inf);
  }
  b.bump_versions();
  // The kernels write to the gradients only to unscale them.
  if (grad_scale) std::for_each(b.gradients.begin(), b.gradients.end(), tamp::bump_version);
}

// Whether the host knows, without asking the device, that the step is skipped.
bool is_known_to_be_skipped(const tamp_optim_scale &scale) {
  if (scale.found_inf == nullptr || !tamp::tensor(scale.found_inf).is_cpu()) return false;
  return tamp::tensor(scale.found_inf).item<float>() != 0.0F;
}

// Copies gradients in the memory of another one, because the kernels unscale in place.
void separate_gradients(std::vector<Entry> &entries) {
  std::vector<const Tensor *> gradients;
  for (const auto &e : entries) gradients.push_back(&e.gradient);
  for (const auto &[one, other] : tamp::overlapping(gradients))
    entries[other].gradient = entries[other].gradient.clone();
}

// The numbers of steps, which a step that the device skips leaves as they are.
struct StepCounts {
  std::vector<Tensor> plain;          // go on by one
  std::vector<Tensor> many;           // go on by `next_step` under random rounding
  std::vector<Tensor> exact;          // go on by one, in i64
  std::vector<Tensor> before, after;  // the numbers of the latter
  Tensor taken, taken_exact;          // one, or zero if the step is skipped; undefined if it is taken anyway

  // Allocates all that `advance` needs.
  void prepare(const std::optional<Tensor> &found_inf) {
    if (found_inf && !(plain.empty() && many.empty())) taken = at::rsub(found_inf->reshape({}), 1);
    if (found_inf && !exact.empty()) taken_exact = found_inf->reshape({}).eq(0).to(at::kLong);
    if (many.empty()) return;
    const Tensor now = at::stack(many), most = at::full({}, kMostSteps, now.options());
    Tensor next = at::maximum(now + 1, at::nextafter(now, most));
    if (found_inf) next = at::where(taken.ne(0), next, now);
    before = now.unbind();
    after = next.unbind();
  }

  void advance() const {
    add(1);
    if (!many.empty()) at::_foreach_copy_(many, after);
  }

  void restore() const {
    add(-1);
    if (!many.empty()) at::_foreach_copy_(many, before);
  }

 private:
  void add(int sign) const {
    add(plain, taken, sign);
    add(exact, taken_exact, sign);
  }

  static void add(const std::vector<Tensor> &steps, const Tensor &taken, int sign) {
    if (steps.empty()) return;
    taken.defined() ? at::_foreach_add_(steps, taken, sign) : at::_foreach_add_(steps, sign);
  }
};

// What steps a batch: one of libtorch's kernels, or several of its operations.
struct Launch {
  Batch batch;
  std::optional<ComposedStep> composed;
  std::optional<LowBitStep> low_bit;
};

// Contiguous copies of parameters with low-bit moments, which are in the order of their elements.
struct Contiguous {
  tamp::Copies in, out;

  void take(Entry &e) {
    if (!e.is_low_bit()) return;
    for (Tensor *t : {&e.parameter, &e.master.tensor}) {
      if (!t->defined() || t->is_contiguous()) continue;
      const Tensor copy = at::empty(t->sizes(), t->options());
      in.add(copy, *t);
      out.add(*t, copy);
      *t = copy;
    }
  }
};

// Whether a step is made of libtorch's operations.
bool is_composed(const Entry &e) { return tamp::optim::is_composed(e.options->algorithm) || e.is_low_bit(); }

}  // namespace

// The step of the parameters on one device.
class OneDevice {
 public:
  OneDevice(std::vector<Entry> entries, const tamp_optim_scale &scale) {
    const at::Device device = entries.front().parameter.device();
    read(scale, device, entries);
    if (scale.grad_scale != nullptr || scale.clip != nullptr) separate_gradients(entries);
    const bool is_skipped = is_known_to_be_skipped(scale);
    std::vector<Entry> direct, indirect;
    for (auto &e : entries) {
      const bool goes_on = e.master.kind == TAMP_MASTER_STOCHASTIC && e.many_steps;
      if (e.step.defined()) (e.is_low_bit() ? counts_.exact : goes_on ? counts_.many : counts_.plain).push_back(e.step);
      contiguous_.take(e);
      // The kernels go over the memory of both with one index.
      if (!are_alike(e.gradient, e.parameter)) {
        e.gradient = at::empty_like(e.parameter, e.gradient.scalar_type()).copy_(e.gradient);
      }
    }
    orthogonalize(entries, prepared_.unscaling, is_skipped);
    find_directions(entries, prepared_.unscaling);
    nadam_coefficients(entries);
    for (auto &e : entries) {
      if (is_clipped_before(e)) e.gradient = clipped(e.gradient);
      if (e.master.kind == TAMP_MASTER_FLOAT) rounded_.add(e.parameter, e.master.tensor);
      for (int i = 0; e.factors && i < kStates; ++i) {
        if (!e.factors->renewed[i].defined()) continue;
        renewed_.add(e.factors->states[i], e.factors->renewed[i]);
        factors_.push_back(e.factors->states[i]);
      }
      (StandIns::are_needed(e) ? indirect : direct).push_back(std::move(e));
    }
    for (auto &e : direct) {
      if (e.master.kind == TAMP_MASTER_FLOAT) e.parameter = e.master.tensor;
    }
    direct_ = launches(direct);
    stand_ins_.emplace(indirect);
    if (planted("memory")) (void)at::empty({1 << 26}, at::TensorOptions(device).dtype(at::kFloat));
    for (size_t i = 0; i < stand_ins_->chunks(); ++i) chunks_.push_back(launches(stand_ins_->entries(i)));
    scratch_.allocate(device);
    tiles_.allocate(device);
    for (auto &launch : direct_) prepare(launch);
    for (auto &chunk : chunks_) {
      for (auto &launch : chunk) prepare(launch);
    }
    tamp::end_lazy_copies(counts_.plain);
    tamp::end_lazy_copies(counts_.many);
    tamp::end_lazy_copies(counts_.exact);
    counts_.prepare(found_inf_);
  }

  void run() const {
    if (planted("wait") && found_inf_) (void)found_inf_->item<float>();
    for (const auto &step : planted("launches") ? counts_.plain : std::vector<Tensor>()) step.mul_(1);
    counts_.advance();
    const Tensor late = planted("late_allocation") ? at::empty_like(counts_.plain.front()) : Tensor();
    try {
      update();
    } catch (...) {
      // A device that lacks a kernel fails before anything else has changed.
      counts_.restore();
      throw;
    }
  }

 private:
  void read(const tamp_optim_scale &scale, at::Device device, const std::vector<Entry> &entries) {
    grad_scale_ = on_device(scale.grad_scale, device);
    found_inf_ = on_device(scale.found_inf, device);
    clip_ = on_device(scale.clip, device);
    const auto multiplied = [&](const Entry &e) { return is_composed(e) || is_clipped_before(e); };
    if (std::any_of(entries.begin(), entries.end(), multiplied)) {
      if (grad_scale_) prepared_.unscaling.inverse = tamp::inverse_of(*grad_scale_).reshape({});
      if (clip_) prepared_.unscaling.clip = clip_->reshape({});
      if (found_inf_) prepared_.found_inf = *found_inf_;
      const bool selects = std::any_of(entries.begin(), entries.end(), [](const Entry &e) { return e.is_low_bit(); });
      if (found_inf_ && selects) prepared_.skip = found_inf_->reshape({}).ne(0);
    }
    if (std::all_of(entries.begin(), entries.end(), multiplied)) return;
    // The kernels divide by a single number, which has to include the clipping.
    if (clip_) grad_scale_ = (grad_scale_ ? *grad_scale_ : at::ones_like(*clip_, at::kFloat)) / clip_->to(at::kFloat);
  }

  // Whether a gradient is unscaled and clipped before a kernel of libtorch reads it: that would divide by an f32 number,
  // which can be infinite where the norm is that of f64 gradients.
  bool is_clipped_before(const Entry &e) const {
    return clip_ && e.gradient.scalar_type() == at::kDouble && !is_composed(e);
  }

  Tensor clipped(const Tensor &gradient) const {
    const auto &[inverse, clip] = prepared_.unscaling;
    return inverse.defined() ? gradient.mul(inverse).mul_(clip) : gradient.mul(clip);
  }

  std::vector<Launch> launches(const std::vector<Entry> &entries) {
    std::vector<Launch> out;
    for (auto &batch : batches(entries)) {
      Launch &launch = out.emplace_back();
      if (batch.kept_as != TAMP_STATES_PLAIN) {
        launch.low_bit.emplace(batch, scratch_, tiles_);
      } else if (is_composed(batch.options->algorithm)) {
        launch.composed.emplace(batch, scratch_);
      }
      launch.batch = std::move(batch);
    }
    return out;
  }

  void prepare(Launch &launch) {
    tamp::end_lazy_copies(launch.batch.parameters);
    if (grad_scale_) tamp::end_lazy_copies(launch.batch.gradients);
    for (const auto &states : launch.batch.states) tamp::end_lazy_copies(states);
    if (launch.composed) launch.composed->prepare(scratch_);
    if (launch.low_bit) launch.low_bit->prepare(scratch_, tiles_);
  }

  void run(const Launch &step) const {
    if (step.composed) return step.composed->run(prepared_);
    if (step.low_bit) return step.low_bit->run(prepared_);
    const bool is_clipped = clip_ && step.batch.gradients.front().scalar_type() == at::kDouble;
    launch(step.batch, is_clipped ? std::nullopt : grad_scale_, found_inf_);
  }

  void update() const {
    contiguous_.in.run();
    for (const auto &step : direct_) run(step);
    TORCH_CHECK(!planted("half_way"), "a planted failure half way");
    for (size_t i = 0; i < chunks_.size(); ++i) {
      stand_ins_->fill(i);
      for (const auto &step : chunks_[i]) run(step);
      stand_ins_->write_back(i);
    }
    renewed_.run_unless(prepared_.found_inf);
    for (const auto &factor : factors_) tamp::bump_version(factor);
    rounded_.run();
    contiguous_.out.run();
  }

  std::optional<Tensor> grad_scale_, clip_, found_inf_;
  StepCounts counts_;
  Prepared prepared_;
  Scratch scratch_;
  Tiles tiles_;
  Contiguous contiguous_;
  std::vector<Launch> direct_;  // what the kernels update directly
  std::optional<tamp::optim::StandIns> stand_ins_;
  std::vector<std::vector<Launch>> chunks_;  // the stand-ins of the others, by chunk
  tamp::Copies renewed_;                     // the states that were computed before
  std::vector<Tensor> factors_;              // they themselves
  tamp::Copies rounded_;                     // parameters, and the f32 copies that they are rounded from
};

DeviceStep::DeviceStep(const std::vector<Entry> &entries, const tamp_optim_scale &scale) {
  const auto device = [](const Entry &e) { return e.parameter.device(); };
  for (auto &list : group_by(entries, device)) devices_.emplace_back(std::move(list), scale);
}

DeviceStep::~DeviceStep() = default;

void DeviceStep::run() const {
  for (const auto &device : devices_) device.run();
}

}  // namespace tamp::optim
