// Averages of weights, which an update moves towards the parameters of a model.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#include "border/guarded.h"
#include "gradients/parallel_chunks.h"
#include "gradients/storage.h"
#include "kernels/kernels.h"

namespace {

using at::Tensor;

struct Pair {
  Tensor average, parameter;
};

void check(const Pair &pair) {
  const auto &[average, parameter] = pair;
  TORCH_CHECK(tamp::has_own_numbers(average) && tamp::has_own_numbers(parameter) && !tamp::overlaps(average),
              "a weight is a negative view, a zero without memory or a nested tensor, which cannot be averaged; "
              "clone it");
  const bool is_wide = average.scalar_type() == at::kDouble || average.scalar_type() == at::kFloat;
  TORCH_CHECK(is_wide && at::isFloatingType(parameter.scalar_type()) &&
                  parameter.element_size() <= average.element_size() && parameter.sizes() == average.sizes() &&
                  parameter.device() == average.device(),
              "a weight is ", parameter.scalar_type(), " ", parameter.sizes(), " on ", parameter.device(),
              " by now, and its average ", average.scalar_type(), " ", average.sizes(), " on ", average.device(),
              "; make the averages after the model has its dtype and device");
}

// ---- the CPU

// The memory that a loop goes over with one index.
struct Memory {
  void *average;
  const void *parameter;
  at::ScalarType dtype;
};

// Whether one loop goes over both: over a parameter and the average that a parameter of this dtype starts with. The
// average keeps its dtype when the model is cast.
bool is_aligned(const Pair &pair) {
  const auto &[average, parameter] = pair;
  const bool is_double = parameter.scalar_type() == at::kDouble;
  if (average.scalar_type() != (is_double ? at::kDouble : at::kFloat)) return false;
  if (!tamp::is_plain_memory(average) || !tamp::is_plain_memory(parameter)) return false;
  return (average.is_contiguous() && parameter.is_contiguous()) || average.strides() == parameter.strides();
}

void update_on_cpu(const std::vector<Pair> &pairs, double weight) {
  // Anything that can fail comes before the loops.
  std::vector<std::pair<Tensor, Tensor>> gapped;
  std::vector<Memory> memory;
  std::vector<int64_t> sizes;
  for (const auto &pair : pairs) {
    if (!is_aligned(pair)) {
      gapped.emplace_back(pair.average, at::lerp(pair.average, pair.parameter.to(pair.average.scalar_type()), weight));
      continue;
    }
    memory.push_back({pair.average.mutable_data_ptr(), pair.parameter.const_data_ptr(), pair.parameter.scalar_type()});
    sizes.push_back(pair.average.numel());
  }
  const auto chunks = tamp::chunks(sizes);
  tamp::for_each(chunks, tamp::From::kStart, [&](int64_t i) {
    const auto &chunk = chunks[static_cast<size_t>(i)];
    const Memory &m = memory[chunk.tensor];
    tamp::with_floating(m.dtype, [&](auto *type) {
      using T = std::remove_pointer_t<decltype(type)>;
      using W = tamp::kernels::Wide<T>;
      tamp::kernels::lerp(weight, static_cast<W *>(m.average) + chunk.begin,
                          static_cast<const T *>(m.parameter) + chunk.begin, chunk.end - chunk.begin);
    });
  });
  for (const auto &[average, updated] : gapped) average.copy_(updated);
}

// ---- other devices

// The numbers of the parameters that are converted and multiplied at once: 128 MiB of f32.
constexpr int64_t kGroup = int64_t{1} << 25;

// With a weight of one or of zero, the sum of the two products is exact.
void move_by(const std::vector<Tensor> &averages, const std::vector<Tensor> &parameters, const Tensor &weight) {
  const Tensor share = weight.to(averages[0].options());
  const Tensor keep = weight.neg().add_(1).to(averages[0].options());
  const auto products = at::_foreach_mul(parameters, share);
  at::_foreach_mul_(averages, keep);
  at::_foreach_add_(averages, products);
}

class AveragedGroup {
 public:
  void add(const Pair &pair, double weight, const Tensor &device_weight) {
    averages_.push_back(pair.average);
    parameters_.push_back(pair.parameter.to(pair.average.scalar_type()));
    numbers_ += pair.average.numel();
    if (numbers_ >= kGroup) update(weight, device_weight);
  }

  void update(double weight, const Tensor &device_weight) {
    if (averages_.empty()) return;
    tamp::end_lazy_copies(averages_);
    if (!device_weight.defined()) {
      at::_foreach_lerp_(averages_, parameters_, weight);
    } else {
      move_by(averages_, parameters_, tamp::on_device(device_weight, averages_[0].device()));
    }
    averages_.clear();
    parameters_.clear();
    numbers_ = 0;
  }

 private:
  std::vector<Tensor> averages_, parameters_;
  int64_t numbers_ = 0;
};

void update_on_devices(const std::vector<Pair> &pairs, double weight, const Tensor &device_weight) {
  std::map<std::pair<c10::DeviceIndex, at::ScalarType>, AveragedGroup> groups;
  for (const auto &pair : pairs) {
    groups[{pair.average.device().index(), pair.average.scalar_type()}].add(pair, weight, device_weight);
  }
  for (auto &group : groups) group.second.update(weight, device_weight);
}

// ---- counting on a device

struct Counted {
  Tensor weight, rest;
};

// Returns the weight of the update after `before` ones, and what is left of the start after it.
Counted counted(const Tensor &before, const Tensor &rest, const tamp_average_options &o) {
  if (o.kind == TAMP_AVERAGE_SWA) return {before.add(1).reciprocal(), at::zeros_like(rest)};
  Tensor decay = at::full_like(before, o.decay);
  if (o.warmup != 0) decay = at::minimum(decay, before.add(1).div(before.add(10)));
  const Tensor next = rest.mul(decay);
  const Tensor weight = decay.neg().add(1);
  if (o.debias != 0) return {weight.div(next.neg().add(1)), next};
  return {weight.masked_fill(before.eq(0), 1), next};
}

}  // namespace

extern "C" {

tamp_tensor *tamp_average_count(const tamp_tensor *count, double updates, double rest, const tamp_tensor *skips,
                                const tamp_average_options *options, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    TORCH_CHECK(count != nullptr || skips != nullptr, "a count on a device needs one");
    const at::Device device = tamp::tensor(skips != nullptr ? skips : count).device();
    const auto number = at::TensorOptions(at::kDouble).device(device);
    const auto now = [&](int64_t i, double given) {
      if (count == nullptr) return at::full({}, given, number);
      return tamp::on_device(tamp::tensor(count), device).select(0, i);
    };
    const Tensor before = now(0, updates), left = now(1, rest);
    const Counted next = counted(before, left, *options);
    if (skips == nullptr) return tamp::give(at::stack({before.add(1), next.rest, next.weight}));
    const Tensor skipped = tamp::tensor(skips).reshape({}).ne(0);
    return tamp::give(at::stack({at::where(skipped, before, before.add(1)), at::where(skipped, left, next.rest),
                                 next.weight.masked_fill(skipped, 0)}));
  });
}

void tamp_average_update(tamp_tensor *const *averages, tamp_tensor *const *parameters, size_t count, double weight,
                         const tamp_tensor *counted, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    std::vector<Pair> cpu, other;
    for (size_t i = 0; i < count; ++i) {
      const Pair pair = {tamp::tensor(averages[i]), tamp::tensor(parameters[i]).detach()};
      check(pair);
      (pair.average.is_cpu() ? cpu : other).push_back(pair);
    }
    const Tensor device_weight = counted == nullptr ? Tensor() : tamp::tensor(counted).select(0, 2);
    if (device_weight.defined() && !cpu.empty()) weight = device_weight.item<double>();
    update_on_cpu(cpu, weight);
    update_on_devices(other, weight, device_weight);
  });
}

}  // extern "C"
