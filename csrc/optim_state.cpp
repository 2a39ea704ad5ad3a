// The state of the fused optimizers.

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

#include "guarded.h"

namespace {

using at::Tensor;

#ifdef __linux__
// Asks for huge pages: a pass over parameters, gradients and state in small pages spends a tenth of its time on finding
// them. A refusal does not matter.
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

// Tensors like the parameters, all of one dtype, filled with `value`, one behind the other in one buffer.
std::vector<Tensor> in_one_buffer(const std::vector<Tensor> &parameters, at::ScalarType dtype, double value) {
  // Odd distances in cache lines, or the loops would walk through memory that falls into the same places of the cache.
  const auto room = [&](const Tensor &t) {
    const int64_t line = 64 / static_cast<int64_t>(c10::elementSize(dtype));
    return (t.numel() + line - 1) / line * line + 5 * line;
  };
  int64_t total = 0;
  for (const auto &p : parameters) total += room(p);
  Tensor buffer = at::empty({total}, parameters.front().options().dtype(dtype).requires_grad(false));
  advise(buffer);
  buffer.fill_(value);
  std::vector<Tensor> out;
  int64_t offset = 0;
  for (const auto &p : parameters) {
    const bool dense = p.is_non_overlapping_and_dense();
    const Tensor shaped = dense ? p : at::empty(p.sizes(), p.options().device(at::kMeta));
    out.push_back(at::as_strided(buffer, p.sizes(), shaped.strides(), offset));
    offset += room(p);
  }
  return out;
}

// The places of the parameters of each dtype.
std::vector<std::vector<size_t>> by_dtype(tamp_tensor *const *parameters, size_t count) {
  std::vector<std::vector<size_t>> out;
  for (size_t i = 0; i < count; ++i) {
    const Tensor &p = tamp::tensor(parameters[i]);
    size_t list = 0;
    while (list < out.size() && tamp::tensor(parameters[out[list].front()]).dtype() != p.dtype()) ++list;
    if (list == out.size()) out.emplace_back();
    out[list].push_back(i);
  }
  return out;
}

std::vector<Tensor> states_like(tamp_tensor *const *parameters, size_t count, std::optional<at::ScalarType> wanted,
                                double value) {
  std::vector<Tensor> out(count);
  for (const auto &list : by_dtype(parameters, count)) {
    std::vector<Tensor> likes;
    std::vector<size_t> places;
    const at::ScalarType dtype = wanted.value_or(tamp::tensor(parameters[list.front()]).scalar_type());
    for (const size_t i : list) {
      const Tensor &p = tamp::tensor(parameters[i]);
      if (p.is_cpu()) {
        likes.push_back(p.detach());
        places.push_back(i);
      } else {
        out[i] = at::full_like(p.detach(), value, p.options().dtype(dtype).requires_grad(false));
      }
    }
    if (likes.empty()) continue;
    auto made = in_one_buffer(likes, dtype, value);
    for (size_t i = 0; i < places.size(); ++i) out[places[i]] = std::move(made[i]);
  }
  return out;
}

}  // namespace

extern "C" {

void tamp_optim_states_new(tamp_tensor *const *parameters, size_t count, int8_t dtype, double value,
                           tamp_tensor **states, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const auto wanted = dtype < 0 ? std::nullopt : std::make_optional(static_cast<at::ScalarType>(dtype));
    auto made = states_like(parameters, count, wanted, value);
    std::vector<std::unique_ptr<Tensor>> given;  // all of them, or none
    for (auto &t : made) given.push_back(std::make_unique<Tensor>(std::move(t)));
    for (size_t i = 0; i < count; ++i) states[i] = tamp::give(std::move(given[i]));
  });
}

}  // extern "C"
