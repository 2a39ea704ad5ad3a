// f32 tensors that stand in for half-precision parameters while libtorch's kernels update them.

#include "optim/scratch_parameters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "border/groups.h"

namespace tamp::optim {
namespace {

using at::Tensor;

uint8_t kind_of(const std::vector<const Entry *> &list) { return list.front()->master.kind; }

std::vector<rounding::Range> ranges(const std::vector<const Entry *> &list, const Pieces &pieces) {
  std::vector<rounding::Range> out;
  for (const auto &piece : pieces.list) {
    const Entry &e = *list[piece.tensor];
    out.push_back({e.master.seed, e.step, piece.begin, piece.place, piece.count});
  }
  return out;
}

}  // namespace

bool StandIns::are_needed(const Entry &e) {
  if (e.master.kind == TAMP_MASTER_FLOAT) return e.gradient.scalar_type() != at::kFloat;
  return e.master.kind != TAMP_MASTER_NONE;
}

StandIns::StandIns(const std::vector<Entry> &entries) {
  List all;
  for (const auto &e : entries) all.push_back(&e);
  const auto lists = group_by(all, [](const Entry *e) { return e->master.kind; });
  std::vector<std::vector<Pieces>> cuts;
  std::vector<std::vector<rounding::Range>> random;
  int64_t most = 0;
  for (const auto &list : lists) {
    std::vector<Tensor> parameters;
    for (const Entry *e : list) parameters.push_back(e->parameter);
    const auto &chunks = cuts.emplace_back(cut(parameters));
    (void)chunk(kind_of(list), largest_chunk(chunks));
    most = std::max(most, largest_chunk(chunks));
    if (kind_of(list) != TAMP_MASTER_STOCHASTIC) continue;
    for (const auto &pieces : chunks) random.push_back(ranges(list, pieces));
  }
  if (most == 0) return;
  scratch_.allocate(entries.front().parameter.device());
  if (!random.empty()) randoms_.emplace(random, scratch_.row(at::kInt, most));
  for (size_t i = 0; i < lists.size(); ++i) {
    for (const auto &pieces : cuts[i]) add(lists[i], pieces);
  }
}

// Returns a chunk with its rows.
StandIns::Chunk StandIns::chunk(uint8_t kind, int64_t numbers) {
  Chunk out;
  out.kind = kind;
  out.words = scratch_.row(at::kInt, numbers);
  if (kind == TAMP_MASTER_FLOAT) return out;
  out.numbers = scratch_.row(at::kFloat, numbers);
  out.mask = scratch_.row(at::kBool, numbers);
  return out;
}

// Returns what a kernel updates for a piece: f32 numbers, with f32 gradients.
Entry StandIns::entry(const Entry &whole, const Piece &piece, const Chunk &chunk, Copies &widened) {
  const bool is_float = whole.master.kind == TAMP_MASTER_FLOAT;
  Entry out = whole;
  out.master = {};
  out.parameter = is_float ? piece.of(whole.master.tensor) : piece.in(chunk.numbers, whole.parameter);
  out.gradient = piece.of(whole.gradient);
  if (out.gradient.scalar_type() != at::kFloat) {
    const Tensor half = std::exchange(out.gradient, piece.in(chunk.words.view(at::kFloat), whole.parameter));
    widened.add(out.gradient, half);
  }
  for (int i = 0; i < kStates; ++i) {
    Tensor &state = out.states[i];
    if (!state.defined()) continue;
    const bool is_of_blocks = i == kExponents && whole.kept_as == TAMP_STATES_EIGHT_BIT;
    state = piece.of(state, is_of_blocks ? kernels::kCodeBlock : 1);
  }
  if (out.direction.defined()) out.direction = piece.of(out.direction);
  return out;
}

// Adds a chunk, and lists what is copied and updated in it.
void StandIns::add(const List &list, const Pieces &pieces) {
  Chunk &chunk = chunks_.emplace_back(this->chunk(kind_of(list), pieces.numbers));
  const bool is_random = chunk.kind == TAMP_MASTER_STOCHASTIC;
  if (is_random) chunk.random = random_++;
  for (const auto &piece : pieces.list) {
    const Entry &whole = *list[piece.tensor];
    // With remainders, the words are the upper halves of numbers first, so the gradients are copied there later.
    chunk.entries.push_back(entry(whole, piece, chunk, is_random ? chunk.in : chunk.gradients));
    if (chunk.kind == TAMP_MASTER_FLOAT) continue;
    const Tensor half = piece.of(whole.parameter), high = half.view(at::kShort);
    const Tensor number = piece.in(chunk.numbers.view(at::kInt), whole.parameter);
    if (is_random) {
      chunk.in.add(chunk.entries.back().parameter, half);
      chunk.out.add(high, number);
    } else {
      const Tensor word = piece.in(chunk.words, whole.parameter), low = piece.of(whole.master.tensor);
      chunk.in.add(word, high);
      chunk.in.add(number, low);
      chunk.out.add(high, word);
      chunk.out.add(low, number);
    }
  }
}

void StandIns::fill(size_t i) const {
  const Chunk &chunk = chunks_[i];
  chunk.in.run();
  if (chunk.kind == TAMP_MASTER_REMAINDER) rounding::join(chunk.words, chunk.numbers.view(at::kInt));
  chunk.gradients.run();
}

void StandIns::write_back(size_t i) const {
  const Chunk &chunk = chunks_[i];
  if (chunk.kind == TAMP_MASTER_FLOAT) return;
  if (chunk.kind == TAMP_MASTER_REMAINDER) {
    rounding::split(chunk.numbers, chunk.words, chunk.mask);
  } else {
    rounding::round_at_random(chunk.numbers, randoms_->draw(chunk.random), chunk.mask);
  }
  chunk.out.run();
}

}  // namespace tamp::optim
