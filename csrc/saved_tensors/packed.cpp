// Activations in fewer bits: f32 in bf16, or all in eight bits with a factor for each row.

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "gradients/parallel_chunks.h"
#include "kernels/kernels.h"
#include "saved_tensors/copies.h"

namespace tamp {
namespace {

using at::Tensor;

// The fewest numbers that share a factor.
constexpr int64_t kShortestRow = 32;

// The codes of infinities, which are NaN in e4m3.
constexpr int64_t kInfinityCode = 0x7f, kMinusInfinityCode = 0xff;

// How many numbers one after the other share a factor: the innermost dimension, with others if it is short.
int64_t row_length(const Places &dense) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 8> dims;  // stride, size
  for (size_t i = 0; i < dense.sizes.size(); ++i) dims.emplace_back(dense.strides[i], dense.sizes[i]);
  std::sort(dims.begin(), dims.end());
  int64_t length = 1;
  for (const auto &[stride, size] : dims) {
    length *= size;
    if (length >= kShortestRow) break;
  }
  return length;
}

class HalfCopy final : public SharedCopy {
 public:
  HalfCopy(const Tensor &t, const CopyKey &key) : SharedCopy(t, key), half_(numbers_of(t).to(at::kBFloat16)) {}

  Tensor numbers() override { return half_.to(at::kFloat); }

 private:
  Tensor half_;
};

class Fp8Copy final : public SharedCopy {
 public:
  Fp8Copy(const Tensor &t, const CopyKey &key) : SharedCopy(t, key), dtype_(t.scalar_type()) {
    const Tensor from = numbers_of(t);
    row_ = row_length(places());
    rows_ = from.numel() / row_;
    if (from.is_cpu()) {
      pack_in_loops(from);
    } else {
      pack_in_operators(from.view({rows_, row_}));
    }
  }

  Tensor numbers() override {
    if (codes_.is_cpu()) return unpack_in_loops();
    const Tensor wide = codes_.to(at::kFloat).view({rows_, row_}), factors = factors_.unsqueeze(1);
    const Tensor bytes = codes_.view(at::kByte).view({rows_, row_});
    const Tensor infinity = at::full({}, std::numeric_limits<float>::infinity(), wide.options());
    const Tensor infinities = at::where(bytes.ge(kMinusInfinityCode), -infinity, infinity) * factors;
    // A number that was rounded up does not become an infinity.
    double largest = 0;
    with_type([&](auto *type) {
      largest = static_cast<float>(std::numeric_limits<std::remove_pointer_t<decltype(type)>>::max());
    });
    const Tensor finite = (wide * factors).clamp_(-largest, largest);
    return at::where(bytes.bitwise_and(kInfinityCode).eq(kInfinityCode), infinities, finite).to(dtype_).view(-1);
  }

 private:
  // Does what kernels::pack_row does.
  void pack_in_operators(const Tensor &rows) {
    const Tensor wide = rows.to(at::kFloat), size = wide.abs(), zero = at::zeros({}, wide.options());
    const Tensor largest = at::where(size.isfinite(), size, zero).amax(1);
    // 448 is 1.75 times a power of two. Only the exponent of the largest number counts, and whether it is above that.
    constexpr int64_t kOver = 0x7fffff - 0x600000, kExponent = 0x7f800000, kLowest = 1 << 23, kBelow = 8 << 23;
    const Tensor bits = (largest.view(at::kInt) + kOver).bitwise_and_(kExponent).sub_(kBelow).clamp_min_(kLowest);
    const Tensor factors = bits.view(at::kFloat);
    const Tensor codes = (wide / factors.unsqueeze(1)).to(at::kFloat8_e4m3fn).view(at::kByte);
    // A number that is not 0 does not become 0: the smallest code is 1.
    const Tensor is_lost = codes.bitwise_and(0x7f).eq(0).logical_and_(wide.ne(0));
    codes.bitwise_or_(is_lost.view(at::kByte));
    // The cast takes an infinity to NaN or to the largest number, depending on the device.
    const auto code = [&](int64_t number) { return at::full({}, number, codes.options()); };
    const Tensor infinities = at::where(wide.lt(0), code(kMinusInfinityCode), code(kInfinityCode));
    codes_ = at::where(wide.isinf(), infinities, codes).view(at::kFloat8_e4m3fn).view(-1);
    const Tensor nan = at::full({}, std::numeric_limits<float>::quiet_NaN(), wide.options());
    factors_ = at::where(wide.isnan().any(1), nan, factors);
  }

  // Calls `f` with a null pointer to the type of the numbers.
  template <typename F>
  void with_type(const F &f) const {
    if (dtype_ == at::kFloat) return f(static_cast<float *>(nullptr));
    if (dtype_ == at::kBFloat16) return f(static_cast<c10::BFloat16 *>(nullptr));
    f(static_cast<c10::Half *>(nullptr));
  }

  // Calls `f` for each row, on libtorch's threads if there are enough numbers.
  template <typename F>
  void for_each_row(const F &f) const {
    constexpr int64_t kNumbersOfTask = 16384;
    const int64_t rows_of_task = std::max<int64_t>(1, kNumbersOfTask / row_);
    const int64_t tasks = (rows_ + rows_of_task - 1) / rows_of_task;
    const auto task = [&](int64_t i) {
      const int64_t end = std::min(rows_, (i + 1) * rows_of_task);
      for (int64_t row = i * rows_of_task; row < end; ++row) f(row);
    };
    if (tasks > 1 && at::get_num_threads() > 1) return in_parallel(tasks, task);
    for (int64_t i = 0; i < tasks; ++i) task(i);
  }

  void pack_in_loops(const Tensor &from) {
    codes_ = at::empty(from.sizes(), from.options().dtype(at::kFloat8_e4m3fn));
    factors_ = at::empty({rows_}, from.options().dtype(at::kFloat));
    auto *codes = static_cast<uint8_t *>(codes_.data_ptr());
    auto *factors = factors_.data_ptr<float>();
    with_type([&](auto *type) {
      const auto *numbers = from.const_data_ptr<std::remove_pointer_t<decltype(type)>>();
      for_each_row(
          [&](int64_t row) { factors[row] = kernels::pack_row(numbers + row * row_, codes + row * row_, row_); });
    });
  }

  Tensor unpack_in_loops() const {
    Tensor out = at::empty(codes_.sizes(), codes_.options().dtype(dtype_));
    const auto *codes = static_cast<const uint8_t *>(codes_.const_data_ptr());
    const auto *factors = factors_.const_data_ptr<float>();
    with_type([&](auto *type) {
      auto *numbers = out.data_ptr<std::remove_pointer_t<decltype(type)>>();
      for_each_row(
          [&](int64_t row) { kernels::unpack_row(codes + row * row_, factors[row], numbers + row * row_, row_); });
    });
    return out;
  }

  at::ScalarType dtype_;
  int64_t row_ = 1, rows_ = 0;
  Tensor codes_, factors_;
};

template <typename Copy>
class Packing final : public Keeper {
 public:
  Packing(CopyFormat format, c10::ArrayRef<at::ScalarType> dtypes) : format_(format), dtypes_(dtypes.vec()) {}

  std::unique_ptr<Kept> keep(const Tensor &saved) override {
    const bool is_packed = std::find(dtypes_.begin(), dtypes_.end(), saved.scalar_type()) != dtypes_.end();
    if (!is_packed || !is_activation(saved)) return keep_small_part(saved);
    const at::AutoDispatchBelowADInplaceOrView numbers_only;
    return SharedCopies::keep(saved, format_, [&](const CopyKey &key) { return std::make_shared<Copy>(saved, key); });
  }

 private:
  CopyFormat format_;
  std::vector<at::ScalarType> dtypes_;
};

}  // namespace

std::shared_ptr<Keeper> keeper_in_half() { return std::make_shared<Packing<HalfCopy>>(CopyFormat::kHalf, at::kFloat); }

std::shared_ptr<Keeper> keeper_in_fp8_rows() {
  const at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
  return std::make_shared<Packing<Fp8Copy>>(CopyFormat::kFp8Rows, dtypes);
}

}  // namespace tamp
