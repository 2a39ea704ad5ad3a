// Renewal of master weights after other code has written to their parameters.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>
#include <vector>

#include "border/groups.h"
#include "border/guarded.h"
#include "gradients/foreach_copy.h"
#include "gradients/storage.h"
#include "optim/optim.h"
#include "optim/scratch.h"

namespace {

using at::Tensor;

struct Renewed {
  Tensor parameter, master;
};

// The renewal of f32 masters on one device whose parameters have one dtype, a chunk at a time. The constructor
// allocates all memory.
class Renewal {
 public:
  explicit Renewal(const std::vector<Renewed> &pairs) {
    std::vector<Tensor> masters;
    for (const auto &pair : pairs) masters.push_back(pair.master);
    const auto cuts = tamp::cut(masters);
    const Tensor &first = pairs.front().parameter;
    tamp::Scratch scratch;
    (void)rows(first.scalar_type(), tamp::largest_chunk(cuts), scratch);
    scratch.allocate(first.device());
    for (const auto &pieces : cuts) {
      Chunk &chunk = chunks_.emplace_back(rows(first.scalar_type(), pieces.numbers, scratch));
      for (const auto &piece : pieces.list) list(piece, pairs[piece.tensor], chunk);
    }
  }

  // Sets every master that no longer rounds to its parameter to the parameter's number.
  void run() const {
    for (const auto &chunk : chunks_) {
      chunk.in.run();
      Tensor differs = chunk.differs[0], kept = chunk.numbers[1];
      at::ne_out(differs, chunk.halves[0], chunk.halves[1]);
      if (!chunk.carry.empty()) keep_ties_away(chunk);
      at::where_out(kept, differs, chunk.numbers[0], kept);
      chunk.out.run();
    }
  }

 private:
  // The rows of a chunk, and what is copied to and from them. Those of numbers and halves begin with the parameters', and
  // the masters' follow. Only bf16 has the last two.
  struct Chunk {
    std::vector<Tensor> halves, numbers, differs, carry, away;
    tamp::Copies in{}, out{};
  };

  // Also keeps masters that round to their parameters only with ties away from zero. Parameters with remainders are
  // rounded this way, and a loaded state may come from such parameters.
  static void keep_ties_away(const Chunk &chunk) {
    Tensor carry = chunk.carry[0], away = chunk.away[0], differs = chunk.differs[0], differs_away = chunk.differs[1];
    at::add_out(carry, chunk.numbers[1].view(at::kInt), at::scalar_tensor(0x8000, carry.options()));
    carry.bitwise_right_shift_(16);
    away.copy_(carry);
    at::ne_out(differs_away, chunk.halves[0].view(at::kShort), away);
    differs.logical_and_(differs_away);
  }

  static Chunk rows(at::ScalarType half, int64_t numbers, tamp::Scratch &scratch) {
    const size_t of_bf16 = half == at::kBFloat16 ? 1 : 0;
    return {scratch.rows(half, 2, numbers), scratch.rows(at::kFloat, 2, numbers),
            scratch.rows(at::kBool, 1 + of_bf16, numbers), scratch.rows(at::kInt, of_bf16, numbers),
            scratch.rows(at::kShort, of_bf16, numbers)};
  }

  static void list(const tamp::Piece &piece, const Renewed &pair, Chunk &chunk) {
    const auto &[parameter, master] = pair;
    const Tensor now = piece.of(parameter), number = piece.of(master), kept = piece.in(chunk.numbers[1], master);
    chunk.in.add(piece.in(chunk.halves[0], master), now);
    chunk.in.add(piece.in(chunk.numbers[0], master), now);
    chunk.in.add(piece.in(chunk.halves[1], master), number);
    chunk.in.add(kept, number);
    chunk.out.add(number, kept);
  }

  std::vector<Chunk> chunks_;
};

void renew(tamp_tensor *const *parameters, tamp_tensor *const *masters, size_t count) {
  std::vector<Tensor> remainders;
  std::vector<Renewed> pairs;
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
    pairs.push_back({std::move(parameter), master});
  }
  const auto kind = [](const Renewed &pair) {
    return std::pair(pair.parameter.device(), pair.parameter.scalar_type());
  };
  std::vector<Renewal> renewals;
  for (const auto &group : tamp::group_by(pairs, kind)) renewals.emplace_back(group);
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
