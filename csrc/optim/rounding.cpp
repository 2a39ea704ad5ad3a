// Rounding of f32 numbers to bf16 parameters on devices other than the CPU.

#include "optim/rounding.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "border/guarded.h"
#include "gradients/storage.h"
#include "kernels/kernels.h"
#include "optim/masters.h"
#include "optim/scratch.h"

namespace tamp::rounding {
namespace {

using at::Tensor;

constexpr int64_t kNaN = 0x7fc00000;

// The number of random words in a row.
constexpr int64_t kWords = kRow / 2;
static_assert(kRow % kernels::kRandomBlock == 0, "a row has whole blocks");

// The columns of the table of Randoms.
enum Column { kKey, kOther, kFirst, kPage, kColumns };

int64_t rows_of(int64_t numbers) { return (numbers + kRow - 1) / kRow; }

// Replaces every NaN by the same one, because rounding could turn another one into zero.
void unite_nans(const Tensor &numbers, Tensor mask) {
  at::ne_out(mask, numbers, numbers);
  numbers.view(at::kInt).masked_fill_(mask, kNaN);
}

// Computes to = x ^ (x >> by) for unsigned x.
void fold(Tensor to, const Tensor &x, Tensor spare, int64_t by) {
  const int64_t width = 8 * static_cast<int64_t>(x.element_size());
  at::bitwise_right_shift_out(spare, x, by);
  spare.bitwise_and_((int64_t{1} << (width - by)) - 1);
  at::bitwise_xor_out(to, x, spare);
}

// Computes x ^= x >> 16 for unsigned 32-bit x: combines the lower halves, which come first in memory, with the upper
// ones.
void fold_halves(const Tensor &x) {
  const Tensor halves = x.view(at::kShort).view({-1, 2});
  halves.select(1, 0).bitwise_xor_(halves.select(1, 1));
}

// Computes `first_round` and `second_round` of kernels/masters.cpp.
void first_round(const Tensor &x, const Tensor &spare) {
  fold_halves(x);
  x.mul_(static_cast<int64_t>(static_cast<int32_t>(0x85ebca6bU)));
  fold(x, x, spare, 13);
}
void second_round(const Tensor &x) {
  x.mul_(static_cast<int64_t>(static_cast<int32_t>(0xc2b2ae35U)));
  fold_halves(x);
}

}  // namespace

void join(const Tensor &high, const Tensor &low) { low.add_(high, 0x10000); }

void split(const Tensor &numbers, const Tensor &high, const Tensor &mask) {
  unite_nans(numbers, mask);
  Tensor out = high;
  // The bits are a sign and a magnitude, so this rounds ties away from zero. The addend is a tensor on the CPU, because
  // the overload for a number would allocate its result.
  at::add_out(out, numbers.view(at::kInt), at::scalar_tensor(0x8000, at::kInt));
  out.bitwise_right_shift_(16);
}

void round_at_random(const Tensor &numbers, const Tensor &random, const Tensor &mask) {
  unite_nans(numbers, mask);
  // The lower halves of infinity and of the NaN are zeros, so that no random number changes the upper ones.
  numbers.view(at::kInt).add_(random).bitwise_right_shift_(16);
}

Randoms::Randoms(const std::vector<std::vector<Range>> &chunks, const Tensor &memory) : memory_(memory) {
  int64_t rows = 0;
  for (const auto &chunk : chunks) {
    const int64_t end = chunk.back().place / kRow + rows_of(chunk.back().count);
    parts_.push_back({ranges_, static_cast<int64_t>(chunk.size()), end});
    ranges_ += parts_.back().ranges;
    rows = std::max(rows, end);
  }
  words_ = at::empty({rows * (kWords + 1)}, memory.options());
  spare_ = at::empty({rows * (kWords + 1)}, memory.options());
  places_ = at::arange(rows * kWords, memory.options());
  range_ = at::empty({rows}, memory.options());
  rows_ = at::empty({rows, kColumns}, memory.options());
  upload(chunks);
  advance_seeds(chunks);
}

// Brings what the host knows to the device in one copy, without synchronizing.
void Randoms::upload(const std::vector<std::vector<Range>> &chunks) {
  const auto options = at::TensorOptions(at::kInt).pinned_memory(memory_.is_cuda());
  const Tensor host = at::empty({ranges_ * (kColumns + 1)}, options);
  auto *row = static_cast<uint32_t *>(host.mutable_data_ptr());
  uint32_t *end = row + ranges_ * kColumns;
  for (const auto &chunk : chunks) {
    for (const auto &range : chunk) {
      const uint64_t seed = range.seed + kSeedStep;
      const auto first = static_cast<uint64_t>(range.first);
      row[kKey] = static_cast<uint32_t>(seed);
      row[kOther] = static_cast<uint32_t>(seed >> 32);
      row[kFirst] = static_cast<uint32_t>(first) / 2 - static_cast<uint32_t>(range.place) / 2;
      row[kPage] = static_cast<uint32_t>(first >> 32);
      row += kColumns;
      *end++ = static_cast<uint32_t>(range.place / kRow + rows_of(range.count));
    }
  }
  tamp::keep_if_captured(host);
  const Tensor there = tamp::on_device(host, memory_.device());
  table_ = there.narrow(0, 0, ranges_ * kColumns).view({ranges_, kColumns});
  ends_ = there.narrow(0, ranges_ * kColumns, ranges_);
}

// Computes `seed_of_step` on the device, because only the device knows the steps.
void Randoms::advance_seeds(const std::vector<std::vector<Range>> &chunks) {
  std::vector<Tensor> steps;
  for (const auto &chunk : chunks) {
    for (const auto &range : chunk) steps.push_back(range.step);
  }
  const auto constant = [](uint64_t x) { return static_cast<int64_t>(x); };
  const Tensor seeds = table_.view(at::kLong).select(1, 0);
  const Tensor x = at::add(seeds, at::stack(steps).to(at::kLong), constant(kSeedStep));
  const Tensor spare = at::empty_like(x);
  fold(x, x, spare, 30);
  x.mul_(constant(kSeedFirst));
  fold(x, x, spare, 27);
  x.mul_(constant(kSeedSecond));
  fold(seeds, x, spare, 31);
}

Tensor Randoms::draw(size_t chunk) const {
  const Part &part = parts_[chunk];
  const int64_t n = part.rows * kWords;
  Tensor range = range_.narrow(0, 0, part.rows), row = rows_.narrow(0, 0, part.rows);
  at::bucketize_out(range, places_.narrow(0, 0, part.rows), ends_.narrow(0, part.first, part.ranges),
                    /*out_int32=*/true, /*right=*/true);
  at::index_select_out(row, table_.narrow(0, part.first, part.ranges), 0, range);
  // The words of the numbers are followed by one for each row, its page. The first round is the same for both.
  const Tensor all = words_.narrow(0, 0, n + part.rows), spare = spare_.narrow(0, 0, n + part.rows);
  const Tensor flat = words_.narrow(0, 0, n), pages = words_.narrow(0, n, part.rows);
  Tensor words = flat.view({part.rows, kWords}), out = pages;
  at::add_out(words, places_.narrow(0, 0, n).view({part.rows, kWords}), row.narrow(1, kFirst, 1));
  words.bitwise_xor_(row.narrow(1, kKey, 1));
  at::bitwise_xor_out(out, row.select(1, kOther), row.select(1, kPage));
  first_round(all, spare);
  second_round(pages);
  words.add_(pages.unsqueeze(1));
  fold(flat, flat, spare.narrow(0, 0, n), 15);
  second_round(flat);
  return halves(part.rows);
}

// Divides the words between the numbers of their blocks.
Tensor Randoms::halves(int64_t rows) const {
  constexpr int64_t kHalf = kernels::kRandomBlock / 2;
  const Tensor words = words_.narrow(0, 0, rows * kWords).view({-1, kHalf});
  const Tensor numbers = memory_.narrow(0, 0, rows * kRow), blocks = numbers.view({-1, 2, kHalf});
  Tensor lower = blocks.select(1, 0), upper = blocks.select(1, 1);
  at::bitwise_and_out(lower, words, 0xffff);
  at::bitwise_right_shift_out(upper, words, 16);
  upper.bitwise_and_(0xffff);
  return numbers;
}

}  // namespace tamp::rounding
