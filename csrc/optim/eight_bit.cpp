// 8-bit moments as tensors.

#include "optim/eight_bit.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "border/guarded.h"
#include "border/shim.h"

namespace tamp::codes {
namespace {

using at::Tensor;
using kernels::kCodeBlock;

// The same numbers as in kernels/low_bit.cpp, as operations on i32 take them.
constexpr int64_t kSignBit = INT32_MIN, kExponentBits = -0x800000, kOneSixteenth = 0x3d800000;
constexpr int64_t kHalfOfBias = int64_t{127} << 22, kInverseUnit = (int64_t{254} << 23) - kHalfOfBias + 0x7fffff;
constexpr int64_t kLowestTop = 32, kHighestTop = 255, kNonFinite = kHighestTop - kLowestTop, kNaN = 0x7fc00000;

Tensor in_blocks(const Tensor &row) { return row.view({-1, kCodeBlock}); }

Tensor numbers(const Tensor &bits) { return bits.view(at::kFloat); }

}  // namespace

Rows Rows::in(Scratch &scratch, int64_t numbers) {
  const auto words = scratch.rows(at::kInt, 4, numbers);
  const auto of_blocks = [&](at::ScalarType dtype) { return scratch.row(dtype, numbers, kCodeBlock); };
  return {words[0], words[1], words[2], words[3], of_blocks(at::kInt), of_blocks(at::kBool)};
}

void decode(const Moments &from, const Rows &rows) {
  Tensor mask = rows.mask, unit = rows.between, sign = rows.spare;
  at::ge_out(mask, from.exponents, kNonFinite);
  rows.tops.copy_(from.exponents).add_(1).bitwise_left_shift_(23);
  rows.squares.copy_(from.exp_avg_sq).bitwise_left_shift_(20);
  in_blocks(rows.squares).add_(rows.tops.unsqueeze(1)).masked_fill_(mask.unsqueeze(1), kNaN);
  at::bitwise_right_shift_out(unit, rows.squares, 1);
  unit.add_(kHalfOfBias).bitwise_and_(kExponentBits);
  rows.moments.copy_(from.exp_avg);
  at::bitwise_and_out(sign, rows.moments, kSignBit);
  unit.bitwise_or_(sign);
  rows.moments.abs_().bitwise_left_shift_(19).add_(kOneSixteenth);
  numbers(rows.moments).sub_(0.0625).mul_(numbers(unit));
}

void encode(const Rows &rows, const Offsets &offsets, uint32_t largest, const Moments &to) {
  offsets.add_to_exp_avg_sq(rows.squares, rows.spare);
  rows.squares.bitwise_right_shift_(20).bitwise_and_(0xfff);
  Tensor tops = rows.tops, kept = in_blocks(rows.squares), code = rows.between, of_blocks = in_blocks(code);
  at::amax_out(tops, kept, {1});
  tops.bitwise_right_shift_(3).clamp_(kLowestTop, kHighestTop).sub_(kLowestTop);
  to.exponents.copy_(tops);
  const Tensor lowest = tops.add_(1).bitwise_left_shift_(3).unsqueeze(1);
  at::maximum_out(kept, kept, lowest);
  at::sub_out(of_blocks, kept, lowest);
  to.exp_avg_sq.copy_(code.clamp_max_(255));
  const Tensor inverse = rows.squares.bitwise_left_shift_(19).neg_().add_(kInverseUnit).bitwise_and_(kExponentBits);
  Tensor scaled = numbers(rows.between), sign = rows.spare;
  at::abs_out(scaled, numbers(rows.moments));
  scaled.mul_(numbers(inverse)).add_(0.0625);
  offsets.add_to_exp_avg(code, rows.spare);
  code.sub_(kOneSixteenth).bitwise_right_shift_(19).clamp_max_(static_cast<int64_t>(largest));
  at::bitwise_right_shift_out(sign, rows.moments, 31);
  to.exp_avg.copy_(code.bitwise_xor_(sign).sub_(sign));
}

namespace {

// Half of the last bit that is kept: moments that are loaded, and not computed by a step, are rounded to the nearest
// code.
struct Halves : Offsets {
  void add_to_exp_avg_sq(const Tensor &bits, const Tensor & /*spare*/) const override { bits.add_(1 << 19); }
  void add_to_exp_avg(const Tensor &bits, const Tensor & /*spare*/) const override { bits.add_(1 << 18); }
};

int64_t whole_blocks(int64_t numbers) { return kernels::code_blocks(numbers) * kCodeBlock; }

// The moments in rows, a part of 2^20 at a time, so that the memory for a conversion is that of one part.
class Parts {
 public:
  Parts(int64_t numbers, at::Device device) : numbers_(numbers) {
    (void)Rows::in(scratch_, std::min(whole_blocks(numbers), kPart));
    scratch_.allocate(device);
  }

  // Calls `f` with the first number of each part, their count, and rows for whole blocks.
  template <typename F>
  void each(const F &f) {
    for (int64_t begin = 0; begin < numbers_; begin += kPart) {
      const int64_t count = std::min(kPart, numbers_ - begin);
      f(begin, count, Rows::in(scratch_, whole_blocks(count)));
    }
  }

 private:
  static constexpr int64_t kPart = int64_t{1} << 20;
  int64_t numbers_;
  Scratch scratch_;
};

// Copies of a part of the codes that fill their last block with zeros.
Moments padded(const Moments &flat, int64_t begin, int64_t count) {
  const auto pad = [&](const Tensor &t) {
    Tensor out = at::zeros({whole_blocks(count)}, t.options());
    out.narrow(0, 0, count).copy_(t.narrow(0, begin, count));
    return out;
  };
  const Tensor exponents = flat.exponents.narrow(0, begin / kCodeBlock, kernels::code_blocks(count));
  return {pad(flat.exp_avg), pad(flat.exp_avg_sq), exponents};
}

Moments flat(const Moments &given) {
  return {given.exp_avg.reshape({-1}), given.exp_avg_sq.reshape({-1}), given.exponents.reshape({-1})};
}

void check(const Moments &given) {
  const int64_t blocks = kernels::code_blocks(given.exp_avg.numel());
  TORCH_CHECK(given.exp_avg.scalar_type() == at::kChar && given.exp_avg_sq.scalar_type() == at::kByte &&
                  given.exponents.scalar_type() == at::kByte && given.exp_avg.sizes() == given.exp_avg_sq.sizes() &&
                  given.exponents.numel() == blocks,
              "8-bit moments are i8, u8 and a u8 for each 32 numbers");
}

}  // namespace
}  // namespace tamp::codes

extern "C" {

void tamp_codes_decode(const tamp_tensor *exp_avg, const tamp_tensor *exp_avg_sq, const tamp_tensor *exponents,
                       tamp_tensor **numbers, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    using namespace tamp::codes;
    const Moments given = {tamp::tensor(exp_avg), tamp::tensor(exp_avg_sq), tamp::tensor(exponents)};
    check(given);
    const auto made = [&] {
      return std::make_unique<at::Tensor>(
          at::empty(given.exp_avg.sizes(), at::TensorOptions(given.exp_avg.device()).dtype(at::kFloat)));
    };
    auto moments = made(), squares = made();
    const Moments codes = flat(given);
    Parts(given.exp_avg.numel(), given.exp_avg.device()).each([&](int64_t begin, int64_t count, const Rows &rows) {
      decode(padded(codes, begin, count), rows);
      const auto copy = [&](const at::Tensor &to, const at::Tensor &bits) {
        to.view({-1}).narrow(0, begin, count).copy_(bits.view(at::kFloat).narrow(0, 0, count));
      };
      copy(*moments, rows.moments);
      copy(*squares, rows.squares);
    });
    numbers[0] = tamp::give(std::move(moments));
    numbers[1] = tamp::give(std::move(squares));
  });
}

void tamp_codes_encode(const tamp_tensor *exp_avg, const tamp_tensor *exp_avg_sq, double beta1, double beta2,
                       tamp_tensor *const *codes, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    using namespace tamp::codes;
    const Moments out = {tamp::tensor(codes[0]), tamp::tensor(codes[1]), tamp::tensor(codes[2])};
    check(out);
    TORCH_CHECK(out.exp_avg.is_contiguous() && out.exp_avg_sq.is_contiguous() && out.exponents.is_contiguous(),
                "8-bit moments are contiguous");
    const at::Tensor moments = tamp::tensor(exp_avg).reshape({-1}), squares = tamp::tensor(exp_avg_sq).reshape({-1});
    const Moments codes = flat(out);
    Parts(out.exp_avg.numel(), out.exp_avg.device()).each([&](int64_t begin, int64_t count, const Rows &rows) {
      const auto fill = [&](const at::Tensor &row, const at::Tensor &numbers) {
        row.zero_();
        row.view(at::kFloat).narrow(0, 0, count).copy_(numbers.narrow(0, begin, count));
      };
      fill(rows.moments, moments);
      fill(rows.squares, squares);
      const Moments made = padded(codes, begin, count);
      encode(rows, Halves(), tamp::kernels::largest_code(beta1, beta2), made);
      codes.exp_avg.narrow(0, begin, count).copy_(made.exp_avg.narrow(0, 0, count));
      codes.exp_avg_sq.narrow(0, begin, count).copy_(made.exp_avg_sq.narrow(0, 0, count));
    });
  });
}

}  // extern "C"
