// Renewal of master weights after other code has written to their parameters.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "border/guarded.h"
#include "gradients/foreach_copy.h"
#include "gradients/storage.h"
#include "optim/optim.h"
#include "optim/scratch.h"

namespace {

using at::Tensor;

// The renewal of f32 masters on one device whose parameters have one dtype, a chunk at a time. The constructor
// allocates all memory.
class Renewal {
 public:
  Renewal(const std::vector<Tensor> &parameters, const std::vector<Tensor> &masters) {
    std::vector<int64_t> sizes;
    for (const auto &master : masters) sizes.push_back(master.numel());
    const auto cuts = tamp::cut(sizes);
    int64_t numbers = 0;
    for (const auto &pieces : cuts) numbers = std::max(numbers, pieces.numbers);
    const auto half = parameters.front().options().requires_grad(false), wide = half.dtype(at::kFloat);
    now_half_ = at::empty({numbers}, half);
    kept_half_ = at::empty({numbers}, half);
    now_ = at::empty({numbers}, wide);
    kept_ = at::empty({numbers}, wide);
    differs_ = at::empty({numbers}, half.dtype(at::kBool));
    if (half.dtype() == at::kBFloat16) {
      carry_ = at::empty({numbers}, half.dtype(at::kInt));
      away_ = at::empty({numbers}, half.dtype(at::kShort));
      differs_away_ = at::empty_like(differs_);
    }
    for (const auto &pieces : cuts) list(pieces, parameters, masters);
  }

  // Sets every master that no longer rounds to its parameter to the parameter's number.
  void run() const {
    for (const auto &chunk : chunks_) {
      const auto part = [&](const Tensor &t) { return t.narrow(0, 0, chunk.numbers); };
      chunk.in.run();
      Tensor differs = part(differs_), kept = part(kept_);
      at::ne_out(differs, part(now_half_), part(kept_half_));
      if (carry_.defined()) keep_ties_away(chunk.numbers, differs);
      at::where_out(kept, differs, part(now_), kept);
      chunk.out.run();
    }
  }

 private:
  // Also keeps masters that round to their parameters only with ties away from zero. Parameters with remainders are
  // rounded this way, and a loaded state may come from such parameters.
  void keep_ties_away(int64_t count, Tensor &differs) const {
    const auto part = [&](const Tensor &t) { return t.narrow(0, 0, count); };
    Tensor carry = part(carry_), away = part(away_), differs_away = part(differs_away_);
    at::add_out(carry, part(kept_).view(at::kInt), at::scalar_tensor(0x8000, carry.options()));
    carry.bitwise_right_shift_(16);
    away.copy_(carry);
    at::ne_out(differs_away, part(now_half_).view(at::kShort), away);
    differs.logical_and_(differs_away);
  }

  struct Chunk {
    int64_t numbers = 0;
    tamp::Copies in, out;
  };

  void list(const tamp::Pieces &pieces, const std::vector<Tensor> &parameters, const std::vector<Tensor> &masters) {
    Chunk &chunk = chunks_.emplace_back();
    chunk.numbers = pieces.numbers;
    for (const auto &piece : pieces.list) {
      const Tensor &master = masters[piece.tensor], number = piece.of(master), kept = piece.in(kept_, master);
      const Tensor now = piece.of(parameters[piece.tensor]);
      chunk.in.add(piece.in(now_half_, master), now);
      chunk.in.add(piece.in(now_, master), now);
      chunk.in.add(piece.in(kept_half_, master), number);
      chunk.in.add(kept, number);
      chunk.out.add(number, kept);
    }
  }

  std::vector<Chunk> chunks_;
  Tensor now_half_, kept_half_, now_, kept_, differs_;
  Tensor carry_, away_, differs_away_;  // for bf16 only
};

struct RenewedGroup {
  std::vector<Tensor> parameters, masters;

  bool takes(const Tensor &parameter) const {
    return parameters.front().device() == parameter.device() && parameters.front().dtype() == parameter.dtype();
  }
};

void renew(tamp_tensor *const *parameters, tamp_tensor *const *masters, size_t count) {
  std::vector<Tensor> remainders;
  std::vector<RenewedGroup> groups;
  for (size_t i = 0; i < count; ++i) {
    Tensor parameter = tamp::tensor(parameters[i]).detach();
    const Tensor &master = tamp::tensor(masters[i]);
    if (master.scalar_type() == at::kShort) {
      remainders.push_back(master);
      continue;
    }
    const bool is_dense = parameter.is_non_overlapping_and_dense();
    if (!is_dense || !tamp::optim::are_alike(parameter, master)) {
      parameter = at::empty_like(master, parameter.scalar_type()).copy_(parameter);
    }
    size_t group = 0;
    while (group < groups.size() && !groups[group].takes(parameter)) ++group;
    if (group == groups.size()) groups.emplace_back();
    groups[group].parameters.push_back(std::move(parameter));
    groups[group].masters.push_back(master);
  }
  std::vector<Renewal> renewals;
  for (const auto &group : groups) renewals.emplace_back(group.parameters, group.masters);
  tamp::end_lazy_copies(remainders);
  if (!remainders.empty()) at::_foreach_zero_(remainders);
  for (const auto &renewal : renewals) renewal.run();
}

}  // namespace

extern "C" {

void tamp_masters_renew(tamp_tensor *const *parameters, tamp_tensor *const *masters, size_t count,
                        char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    renew(parameters, masters, count);
  });
}

}  // extern "C"
