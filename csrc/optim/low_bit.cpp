// The step with low-bit moments, on devices other than the CPU.

#include "optim/low_bit.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "border/guarded.h"
#include "gradients/storage.h"
#include "kernels/kernels.h"

namespace tamp::optim {
namespace {

using at::Tensor;
using kernels::kCodeBlock;
using kernels::kDitherPeriod;

static_assert(kRow % kDitherPeriod == 0, "a piece begins where the dither does");

// The columns of what belongs to a tensor, or to a tile.
enum Column { kStepSize, kEps, kExpAvgWord, kExpAvgSqWord, kColumns };

constexpr int64_t kNaN = 0x7fc00000;

int64_t tiles_of(int64_t numbers) { return (numbers + kDitherPeriod - 1) / kDitherPeriod; }

// Rounds a scalar to f32, as the CPU's loops use it; libtorch's operations take it as an f64.
double rounded(double x) { return static_cast<double>(static_cast<float>(x)); }

Tensor numbers(const Tensor &bits) { return bits.view(at::kFloat); }

// Computes to = x * factor + added in f64, and rounds the result to f32.
template <typename Factor>
void multiply_add(const Tensor &to, const Tensor &x, const Factor &factor, const Tensor &added, const Tensor &wide) {
  wide.copy_(x);
  wide.mul_(factor).add_(added);
  to.copy_(wide);
}

// The dither of a chunk's numbers.
struct ChunkOffsets : codes::Offsets {
  const Tensor &index, &tiles;
  int width;

  ChunkOffsets(const Tensor &index, const Tensor &tiles, int width) : index(index), tiles(tiles), width(width) {}

  void add_to_exp_avg_sq(const Tensor &bits, const Tensor &spare) const override {
    add(bits, spare, kExpAvgSqWord, width == 8 ? 20 : 16);
  }
  void add_to_exp_avg(const Tensor &bits, const Tensor &spare) const override {
    add(bits, spare, kExpAvgWord, width == 8 ? 19 : 16);
  }

 private:
  // Adds the upper `count` bits of the dither's words.
  void add(const Tensor &bits, const Tensor &spare, Column column, int count) const {
    Tensor words = spare.view({-1, kDitherPeriod});
    at::add_out(words, index, tiles.narrow(1, column, 1));
    spare.bitwise_right_shift_(32 - count).bitwise_and_((int64_t{1} << count) - 1);
    bits.add_(spare);
  }
};

}  // namespace

void Tiles::allocate(at::Device device) {
  if (most == 0) return;
  const auto ints = at::TensorOptions(device).dtype(at::kInt);
  index = at::arange(kDitherPeriod, ints.dtype(at::kLong)).mul_(int64_t{kernels::Dither::kIndex}).to(at::kInt);
  places = at::arange(most, ints);
}

LowBitStep::LowBitStep(const Batch &batch, Scratch &scratch, Tiles &tiles)
    : batch_(batch),
      is_coded_(batch.kept_as == TAMP_STATES_EIGHT_BIT),
      is_muon_(batch.options->algorithm == TAMP_OPTIM_MUON),
      places_(batch.places()) {
  const int64_t most = tiles_of(largest_chunk(cut(batch_.parameters)));
  tiles.most = std::max(tiles.most, most);
  (void)chunk(most, scratch);
}

int64_t LowBitStep::per(int place) const { return is_coded_ && place == kExponents ? kCodeBlock : 1; }

// Returns a chunk with its rows.
LowBitStep::Chunk LowBitStep::chunk(int64_t tiles, Scratch &scratch) const {
  const int64_t n = tiles * kDitherPeriod;
  Chunk out;
  out.words = codes::Rows::in(scratch, n);
  out.moments = numbers(out.words.moments);
  out.squares = numbers(out.words.squares);
  const auto floats = scratch.rows(at::kFloat, 2, n);
  out.parameter = floats[0];
  out.gradient = floats[1];
  out.wide = scratch.row(at::kDouble, n);
  for (const int place : places_) {
    const size_t first = is_coded_ ? 0 : 2 * out.before.size();  // bf16 states share a dtype
    const auto rows = scratch.rows(batch_.states[place].front().scalar_type(), first + 2, n, per(place));
    out.before.push_back(rows[first]);
    out.after.push_back(rows[first + 1]);
  }
  if (!is_coded_) out.mask = scratch.row(at::kBool, n);
  out.range = scratch.row(at::kInt, n, kDitherPeriod);
  out.tiles = scratch.row(at::kInt, n, kDitherPeriod / kColumns).view({-1, kColumns});
  return out;
}

void LowBitStep::prepare(Scratch &scratch, const Tiles &tiles) {
  const auto cuts = cut(batch_.parameters);
  if (cuts.empty()) return;
  for (const auto &pieces : cuts) {
    const int64_t count = tiles_of(pieces.numbers);
    Chunk &now = chunks_.emplace_back(chunk(count, scratch));
    now.index = tiles.index;
    now.places = tiles.places.narrow(0, 0, count);
    for (const auto &piece : pieces.list) list(piece, now);
  }
  upload(cuts);
}

// Lists what is copied to and from a chunk.
void LowBitStep::list(const Piece &piece, Chunk &chunk) const {
  const Tensor &like = batch_.parameters[piece.tensor];
  chunk.has_tail |= !is_muon_ && piece.count % kCodeBlock != 0;
  chunk.in.add(piece.in(chunk.parameter, like), piece.of(like));
  chunk.out.add(piece.of(like), piece.in(chunk.parameter, like));
  chunk.in.add(piece.in(chunk.gradient, like), piece.of(batch_.gradients[piece.tensor]));
  for (const int place : places_) {
    const Tensor part = piece.of(batch_.states[place][piece.tensor], per(place));
    chunk.in.add(piece.in(chunk.before[place], part, per(place)), part);
    chunk.out.add(part, piece.in(chunk.after[place], part, per(place)));
  }
  // In the row of the second moments.
  if (is_muon_) chunk.in.add(piece.in(chunk.squares, like), piece.of(batch_.direction[piece.tensor]));
}

// Brings the ends of the pieces and their tensors to the device in one copy, without synchronizing.
void LowBitStep::upload(const std::vector<Pieces> &cuts) {
  const at::Device device = batch_.parameters.front().device();
  std::vector<int32_t> ends, tensors;
  for (const auto &pieces : cuts) {
    for (const auto &piece : pieces.list) {
      ends.push_back(static_cast<int32_t>(piece.place / kDitherPeriod + tiles_of(piece.count)));
      tensors.push_back(static_cast<int32_t>(piece.tensor));
    }
  }
  const auto count = static_cast<int64_t>(ends.size());
  const auto options = at::TensorOptions(at::kInt).pinned_memory(device.is_cuda());
  const Tensor host = at::empty({2 * count}, options);
  auto *room = static_cast<int32_t *>(host.mutable_data_ptr());
  std::copy(tensors.begin(), tensors.end(), std::copy(ends.begin(), ends.end(), room));
  tamp::keep_if_captured(host);
  const Tensor there = tamp::on_device(host, device);
  const Tensor numbers = step_numbers().index_select(0, there.narrow(0, count, count));
  int64_t first = 0;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const auto pieces = static_cast<int64_t>(cuts[i].list.size());
    chunks_[i].ends = there.narrow(0, first, pieces);
    chunks_[i].numbers = numbers.narrow(0, first, pieces);
    first += pieces;
  }
}

// Computes in f64 on the device, because only the device knows the steps, what the loops take from the host.
Tensor LowBitStep::step_numbers() const {
  const tamp_optim_options &o = *batch_.options;
  const Tensor step = at::stack(batch_.steps).view({-1}).add_(1);
  const auto words = [&](uint32_t of_step) { return step.mul(int64_t{of_step}).to(at::kInt); };
  // Muon only reads the column of these words.
  if (is_muon_) return words(kernels::Dither::kExpAvg).unsqueeze(1).expand({-1, kColumns});
  const Tensor exponent = step.to(at::kDouble);
  const Tensor correction1 = at::pow(o.beta1, exponent).neg_().add_(1);
  const Tensor root2 = at::pow(o.beta2, exponent).neg_().add_(1).sqrt_();
  const Tensor along = has_device_rates(o) ? root2.mul(device_rate(o)).neg_() : root2.mul(-o.lr);
  const Tensor step_size = along.div_(correction1).to(at::kFloat);
  const Tensor eps = root2.mul(o.eps).to(at::kFloat);
  return at::stack({step_size.view(at::kInt), eps.view(at::kInt), words(kernels::Dither::kExpAvg),
                    words(kernels::Dither::kExpAvgSq)},
                   1);
}

void LowBitStep::unscale(const Chunk &x, const Prepared &scale) const {
  const tamp_optim_options &o = *batch_.options;
  if (scale.unscaling.inverse.defined()) x.gradient.mul_(scale.unscaling.inverse);
  if (scale.unscaling.clip.defined()) x.gradient.mul_(scale.unscaling.clip);
  if ((o.flags & TAMP_OPTIM_MAXIMIZE) != 0) x.gradient.neg_();
  const bool decays = o.algorithm == TAMP_OPTIM_ADAM && static_cast<float>(o.weight_decay) != 0;
  if (decays) multiply_add(x.gradient, x.parameter, rounded(o.weight_decay), x.gradient, x.wide);
}

void LowBitStep::decode(const Chunk &x) const {
  if (is_coded_) return codes::decode({x.before[kExpAvg], x.before[kExpAvgSq], x.before[kExponents]}, x.words);
  x.moments.copy_(x.before[kExpAvg]);
  if (!is_muon_) x.squares.copy_(x.before[kExpAvgSq]);
}

void LowBitStep::encode(const Chunk &x) const {
  const ChunkOffsets offsets(x.index, x.tiles, is_coded_ ? 8 : 16);
  if (is_coded_) {
    const uint32_t largest = kernels::largest_code(batch_.options->beta1, batch_.options->beta2);
    const codes::Moments after = {x.after[kExpAvg], x.after[kExpAvgSq], x.after[kExponents]};
    return codes::encode(x.words, offsets, largest, after);
  }
  Tensor mask = x.mask;
  for (const int place : places_) {
    const Tensor &row = place == kExpAvg ? x.words.moments : x.words.squares;
    at::ne_out(mask, numbers(row), numbers(row));
    row.masked_fill_(mask, kNaN);
    place == kExpAvg ? offsets.add_to_exp_avg(row, x.words.spare) : offsets.add_to_exp_avg_sq(row, x.words.spare);
    x.after[place].view(at::kShort).copy_(row.bitwise_right_shift_(16));
  }
}

// Updates the momentum in place, and writes the new parameter to `to`, like `update`.
void LowBitStep::update_by_muon(const Chunk &x, const Tensor &to) const {
  const tamp_optim_options &o = *batch_.options;
  x.moments.lerp_(x.gradient, 1 - o.momentum);
  if (!to.is_same(x.parameter)) to.copy_(x.parameter);
  const Tensor &orthogonal = x.squares;
  move_along(o, batch_.rate, to, orthogonal);
}

// Updates the moments in place, and writes the new parameter to `to`, which may be the old one or the gradient.
void LowBitStep::update(const Chunk &x, const Tensor &to) const {
  const tamp_optim_options &o = *batch_.options;
  Tensor between = numbers(x.words.between), spare = numbers(x.words.spare);
  const auto of_tiles = [&](Column column) { return numbers(x.tiles).narrow(1, column, 1); };
  const auto in_tiles = [](const Tensor &row) { return row.view({-1, kDitherPeriod}); };
  at::sub_out(between, x.gradient, x.moments);
  multiply_add(x.moments, between, rounded(1 - o.beta1), x.moments, x.wide);
  at::mul_out(between, x.gradient, at::scalar_tensor(rounded(1 - o.beta2), at::kDouble));
  between.mul_(x.gradient);
  multiply_add(x.squares, x.squares, rounded(o.beta2), between, x.wide);
  // In f64, because a library's root of an f32 may not be the nearest one.
  x.wide.copy_(x.squares);
  spare.copy_(x.wide.sqrt_());
  in_tiles(spare).add_(of_tiles(kEps));
  Tensor update = in_tiles(between);
  at::mul_out(update, in_tiles(x.moments), of_tiles(kStepSize));
  between.div_(spare);
  const bool decays = o.algorithm == TAMP_OPTIM_ADAMW;
  if (decays && has_device_rates(o)) return multiply_add(to, x.parameter, device_keep(o), between, x.wide);
  multiply_add(to, x.parameter, decays ? rounded(1 - o.lr * o.weight_decay) : 1.0, between, x.wide);
}

void LowBitStep::run(const Prepared &scale) const {
  for (const auto &x : chunks_) {
    Tensor range = x.range, tiles = x.tiles;
    at::bucketize_out(range, x.places, x.ends, /*out_int32=*/true, /*right=*/true);
    at::index_select_out(tiles, x.numbers, 0, range);
    // The missing elements of a last block are zeros, so that none is its largest. So are their parameters, because
    // Adam's weight decay adds them to gradients.
    if (x.has_tail) {
      x.parameter.zero_();
      x.gradient.zero_();
      x.before[kExpAvgSq].zero_();
    }
    x.in.run();
    unscale(x, scale);
    decode(x);
    const Tensor &to = scale.skip.defined() ? x.gradient : x.parameter;
    is_muon_ ? update_by_muon(x, to) : update(x, to);
    encode(x);
    if (scale.skip.defined()) {
      Tensor parameter = x.parameter;
      at::where_out(parameter, scale.skip, x.parameter, x.gradient);
      for (size_t i = 0; i < x.after.size(); ++i) {
        Tensor after = x.after[i];
        at::where_out(after, scale.skip, x.before[i], after);
      }
    }
    x.out.run();
  }
  batch_.bump_versions();
}

}  // namespace tamp::optim
