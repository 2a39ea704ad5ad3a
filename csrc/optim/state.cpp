// Allocation of the state of the fused optimizers.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "border/groups.h"
#include "border/guarded.h"
#include "gradients/foreach_copy.h"
#include "kernels/kernels.h"

namespace {

using at::Tensor;

#ifdef __linux__
// Asks for huge pages, because a pass over parameters, gradients and state in small pages spends a tenth of its time on
// address translation. A refusal does no harm.
void advise(const Tensor &buffer) {
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const auto begin = reinterpret_cast<uintptr_t>(buffer.data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + buffer.nbytes()) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
}
#else
void advise(const Tensor &) {}
#endif

// A tensor of the shape and strides of a state.
Tensor shaped(const Tensor &parameter, uint8_t shape) {
  const auto meta = parameter.options().device(at::kMeta);
  if (shape == TAMP_STATE_OF_BLOCKS) return at::empty({tamp::kernels::code_blocks(parameter.numel())}, meta);
  if (shape == TAMP_STATE_OF_ONE) return at::empty({}, meta);
  if (shape == TAMP_STATE_OF_ROWS || shape == TAMP_STATE_OF_COLUMNS) {
    auto sizes = parameter.sizes().vec();
    sizes.at(sizes.size() - (shape == TAMP_STATE_OF_ROWS ? 1 : 2)) = 1;
    return at::empty(sizes, meta);
  }
  const bool is_like = shape == TAMP_STATE_LIKE && parameter.is_non_overlapping_and_dense();
  return is_like ? parameter : at::empty(parameter.sizes(), meta);
}

// Makes states of the parameters, all of one dtype and device, one after the other in one buffer. Fills the buffer with
// `value`, if there is one.
std::vector<Tensor> in_one_buffer(const std::vector<Tensor> &parameters, at::ScalarType dtype, uint8_t shape,
                                  std::optional<double> value) {
  // Each tensor is padded by an odd number of cache lines. Otherwise the loops would go through several tensors at
  // addresses that fall into the same sets of the cache.
  const auto room = [&](const Tensor &t) {
    const int64_t line = 64 / static_cast<int64_t>(c10::elementSize(dtype));
    return (t.numel() + line - 1) / line * line + 5 * line;
  };
  int64_t total = 0;
  std::vector<Tensor> shapes;
  for (const auto &p : parameters) total += room(shapes.emplace_back(shaped(p, shape)));
  Tensor buffer = at::empty({total}, parameters.front().options().dtype(dtype).requires_grad(false));
  if (buffer.is_cpu()) advise(buffer);
  if (value) buffer.fill_(*value);
  std::vector<Tensor> out;
  int64_t offset = 0;
  for (const auto &like : shapes) {
    out.push_back(at::as_strided(buffer, like.sizes(), like.strides(), offset));
    offset += room(like);
  }
  return out;
}

// Parameters whose states are parts of one buffer.
struct List {
  std::vector<Tensor> parameters;
  std::vector<size_t> places;
  int64_t numbers = 0;

  // The size of a buffer is limited on devices other than the CPU, which may have no free block as large as all of the
  // state.
  bool takes(const Tensor &p) const {
    constexpr int64_t kNumbers = int64_t{1} << 24;
    const Tensor &first = parameters.front();
    return first.dtype() == p.dtype() && first.device() == p.device() && (p.is_cpu() || numbers < kNumbers);
  }
};

std::vector<List> lists(tamp_tensor *const *parameters, size_t count) {
  std::vector<List> out;
  for (size_t i = 0; i < count; ++i) {
    Tensor p = tamp::tensor(parameters[i]).detach();
    List &list = tamp::group_for(out, [&](const List &other) { return other.takes(p); });
    list.numbers += p.numel();
    list.parameters.push_back(std::move(p));
    list.places.push_back(i);
  }
  return out;
}

std::vector<Tensor> states_of(tamp_tensor *const *parameters, size_t count, std::optional<at::ScalarType> dtype,
                              uint8_t shape, std::optional<double> value) {
  std::vector<Tensor> out(count);
  for (const auto &list : lists(parameters, count)) {
    auto made = in_one_buffer(list.parameters, dtype.value_or(list.parameters.front().scalar_type()), shape, value);
    for (size_t i = 0; i < made.size(); ++i) out[list.places[i]] = std::move(made[i]);
  }
  return out;
}

// Gives all tensors to the caller or, if memory runs out, none.
void give_all(std::vector<Tensor> made, tamp_tensor **out) {
  std::vector<std::unique_ptr<Tensor>> given;
  for (auto &t : made) given.push_back(std::make_unique<Tensor>(std::move(t)));
  for (size_t i = 0; i < given.size(); ++i) out[i] = tamp::give(std::move(given[i]));
}

}  // namespace

extern "C" {

void tamp_optim_states_new(tamp_tensor *const *parameters, size_t count, int8_t dtype, uint8_t shape, double value,
                           tamp_tensor **states, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const auto wanted = dtype < 0 ? std::nullopt : std::make_optional(static_cast<at::ScalarType>(dtype));
    give_all(states_of(parameters, count, wanted, shape, value), states);
  });
}

void tamp_masters_new(tamp_tensor *const *parameters, size_t count, tamp_tensor **masters, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    auto made = states_of(parameters, count, at::kFloat, TAMP_STATE_LIKE, std::nullopt);
    tamp::Copies copies;
    for (size_t i = 0; i < count; ++i) copies.add(made[i], tamp::tensor(parameters[i]).detach());
    copies.run();
    give_all(std::move(made), masters);
  });
}

}  // extern "C"
