// f32 tensors that stand in for half-precision parameters while libtorch's kernels update them.

#include "optim/scratch_parameters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

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
  std::vector<List> lists;  // one for each kind of master weights
  for (const auto &e : entries) {
    size_t i = 0;
    while (i < lists.size() && kind_of(lists[i]) != e.master.kind) ++i;
    if (i == lists.size()) lists.emplace_back();
    lists[i].push_back(&e);
  }
  std::vector<std::vector<Pieces>> cuts;
  for (const auto &list : lists) {
    std::vector<int64_t> sizes;
    for (const Entry *e : list) sizes.push_back(e->parameter.numel());
    cuts.push_back(cut(sizes));
  }
  if (!lists.empty()) allocate(lists, cuts);
  for (size_t i = 0; i < lists.size(); ++i) {
    for (const auto &pieces : cuts[i]) add(lists[i], pieces);
  }
}

void StandIns::allocate(const std::vector<List> &lists, const std::vector<std::vector<Pieces>> &cuts) {
  int64_t numbers = 0, words = 0;
  std::vector<std::vector<rounding::Range>> random;
  for (size_t i = 0; i < lists.size(); ++i) {
    const uint8_t kind = kind_of(lists[i]);
    for (const auto &pieces : cuts[i]) {
      if (kind == TAMP_MASTER_STOCHASTIC) random.push_back(ranges(lists[i], pieces));
      words = std::max(words, pieces.numbers);
      if (kind != TAMP_MASTER_FLOAT) numbers = std::max(numbers, pieces.numbers);
    }
  }
  const auto options = at::TensorOptions(lists.front().front()->parameter.device());
  words_ = at::empty({words}, options.dtype(at::kInt));
  numbers_ = at::empty({numbers}, options.dtype(at::kFloat));
  mask_ = at::empty({numbers}, options.dtype(at::kBool));
  if (!random.empty()) randoms_.emplace(random, words_);
}

// Returns what a kernel updates for a piece: f32 numbers, with f32 gradients.
Entry StandIns::entry(const Entry &whole, const Piece &piece, Copies &widened) const {
  const bool is_float = whole.master.kind == TAMP_MASTER_FLOAT;
  Entry out = whole;
  out.master = {};
  out.parameter = is_float ? piece.of(whole.master.tensor) : piece.in(numbers_, whole.parameter);
  out.gradient = piece.of(whole.gradient);
  if (out.gradient.scalar_type() != at::kFloat) {
    const Tensor half = std::exchange(out.gradient, piece.in(words_.view(at::kFloat), whole.parameter));
    widened.add(out.gradient, half);
  }
  for (int i = 0; i < kStates; ++i) {
    Tensor &state = out.states[i];
    if (!state.defined()) continue;
    const bool is_of_blocks = i == kExponents && whole.kept_as == TAMP_STATES_EIGHT_BIT;
    state = is_of_blocks ? piece.of_blocks(state, kernels::kCodeBlock) : piece.of(state);
  }
  if (out.direction.defined()) out.direction = piece.of(out.direction);
  return out;
}

// Adds a chunk, and lists what is copied and updated in it.
void StandIns::add(const List &list, const Pieces &pieces) {
  Chunk &chunk = chunks_.emplace_back();
  chunk.kind = kind_of(list);
  chunk.numbers = pieces.numbers;
  const bool is_random = chunk.kind == TAMP_MASTER_STOCHASTIC;
  if (is_random) chunk.random = random_++;
  for (const auto &piece : pieces.list) {
    const Entry &whole = *list[piece.tensor];
    // With remainders, `words_` holds the upper halves of numbers first, so the gradients are copied there later.
    chunk.entries.push_back(entry(whole, piece, is_random ? chunk.in : chunk.gradients));
    if (chunk.kind == TAMP_MASTER_FLOAT) continue;
    const Tensor half = piece.of(whole.parameter), high = half.view(at::kShort);
    const Tensor number = piece.in(numbers_.view(at::kInt), whole.parameter);
    if (is_random) {
      chunk.in.add(chunk.entries.back().parameter, half);
      chunk.out.add(high, number);
    } else {
      const Tensor word = piece.in(words_, whole.parameter), low = piece.of(whole.master.tensor);
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
  if (chunk.kind == TAMP_MASTER_REMAINDER) {
    rounding::join(words_.narrow(0, 0, chunk.numbers), numbers_.view(at::kInt).narrow(0, 0, chunk.numbers));
  }
  chunk.gradients.run();
}

void StandIns::write_back(size_t i) const {
  const Chunk &chunk = chunks_[i];
  if (chunk.kind == TAMP_MASTER_FLOAT) return;
  const Tensor numbers = numbers_.narrow(0, 0, chunk.numbers), mask = mask_.narrow(0, 0, chunk.numbers);
  if (chunk.kind == TAMP_MASTER_REMAINDER) {
    rounding::split(numbers, words_.narrow(0, 0, chunk.numbers), mask);
  } else {
    rounding::round_at_random(numbers, randoms_->draw(chunk.random), mask);
  }
  chunk.out.run();
}

}  // namespace tamp::optim
