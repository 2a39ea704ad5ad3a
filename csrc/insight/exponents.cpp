// Counts of the exponents of gradients.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "border/groups.h"
#include "border/guarded.h"
#include "gradients/parallel_chunks.h"
#include "gradients/storage.h"
#include "insight/shim_insight.h"

namespace {

using at::Tensor;

// The bin of the exponent zero.
constexpr int64_t kBinOfZero = TAMP_BIN_EXPONENTS + TAMP_EXPONENTS_BELOW_ZERO;

// ---- the numbers of gradients

// The numbers of a gradient in one dimension, in any order.
Tensor numbers_of(const Tensor &gradient) {
  TORCH_CHECK(gradient.defined(), "a gradient to be counted is missing");
  Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  if (values.is_complex()) values = at::view_as_real(values.resolve_conj());
  values = tamp::with_own_numbers(values);
  const size_t needed = at::detail::computeStorageNbytes(values.sizes(), values.strides(), values.element_size(),
                                                         static_cast<size_t>(values.storage_offset()));
  TORCH_CHECK(needed <= values.storage().nbytes(), "the memory of a gradient was taken away");
  if (values.is_non_overlapping_and_dense()) {
    return values.as_strided({values.numel()}, {1}, values.storage_offset());
  }
  return values.reshape({-1});
}

struct Part {
  Tensor numbers;
  int64_t row;
};

// Numbers that are counted together: those of one device and dtype that were scaled alike.
struct Group {
  at::Device device;
  at::ScalarType dtype;
  bool unscaled;
  std::vector<Part> parts{};
};

std::vector<Group> groups_of(const tamp_counted_gradient *gradients, size_t count) {
  std::vector<Group> groups;
  for (size_t i = 0; i < count; ++i) {
    const bool unscaled = gradients[i].unscaled != 0;
    Tensor numbers = numbers_of(tamp::gradient(tamp::tensor(gradients[i].parameter)));
    if (numbers.numel() == 0) continue;
    const auto takes = [&](const Group &group) {
      return group.device == numbers.device() && group.dtype == numbers.scalar_type() && group.unscaled == unscaled;
    };
    Group &group = tamp::group_for(groups, takes, numbers.device(), numbers.scalar_type(), unscaled);
    group.parts.push_back({std::move(numbers), gradients[i].row});
  }
  return groups;
}

// ---- the CPU

// The bits of a floating-point number, and how many of them are below the exponent.
template <typename T>
struct Format {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  static constexpr int kRest = sizeof(T) == 8 ? 52 : sizeof(T) == 4 ? 23 : std::is_same_v<T, c10::BFloat16> ? 7 : 10;
  static constexpr int kFields = 1 << (8 * sizeof(T) - 1 - kRest);
  static constexpr int kBias = kFields / 2 - 1;
};

int64_t bin_of(int64_t exponent) {
  return std::clamp<int64_t>(exponent + kBinOfZero, TAMP_BIN_EXPONENTS, TAMP_BINS - 1);
}

// The bin of a number whose exponent field has no bit set, or all of them.
template <typename F>
int64_t bin_of_special(typename F::Bits bits, int64_t exponent_of_scale) {
  const uint64_t rest = bits & ((uint64_t{1} << F::kRest) - 1);
  const bool is_large = ((bits >> F::kRest) & 1) != 0;
  if (is_large) return rest == 0 ? TAMP_BIN_INFINITE : TAMP_BIN_NAN;
  if (rest == 0) return TAMP_BIN_ZERO;
  // It is the whole number `rest` times the smallest subnormal one.
  return bin_of(63 - __builtin_clzll(rest) - F::kRest - F::kBias + 1 - exponent_of_scale);
}

using Bins = std::array<int64_t, TAMP_BINS>;

// Counts by the bits of the exponent, in several tables, so that an increment need not wait for the one before.
template <typename T>
void count(const T *values, int64_t n, int64_t exponent_of_scale, Bins &bins) {
  using F = Format<T>;
  constexpr int64_t kTables = 4;
  uint32_t tables[kTables][F::kFields] = {};
  for (int64_t i = 0; i < n; ++i) {
    typename F::Bits bits;
    std::memcpy(&bits, values + i, sizeof bits);
    const auto field = static_cast<int>((bits >> F::kRest) & (F::kFields - 1));
    ++tables[i % kTables][field];
    if (field == 0 || field == F::kFields - 1) ++bins[bin_of_special<F>(bits, exponent_of_scale)];
  }
  for (int field = 1; field < F::kFields - 1; ++field) {
    int64_t sum = 0;
    for (const auto &table : tables) sum += table[field];
    bins[bin_of(field - F::kBias - exponent_of_scale)] += sum;
  }
}

// Adds the counts of a group on the CPU to `counts`, which has a row of bins for each layer.
void count_on_cpu(const Group &group, int64_t exponent_of_scale, int64_t *counts) {
  std::vector<int64_t> sizes;
  std::vector<const void *> memory;
  for (const auto &part : group.parts) {
    sizes.push_back(part.numbers.numel());
    memory.push_back(part.numbers.const_data_ptr());
  }
  std::mutex mutex;
  const auto chunks = tamp::chunks(sizes);
  tamp::for_each(chunks, tamp::From::kStart, [&](int64_t i) {
    const auto &chunk = chunks[static_cast<size_t>(i)];
    Bins bins = {};
    tamp::with_floating(group.dtype, [&](auto *type) {
      const auto *begin = static_cast<decltype(type)>(const_cast<void *>(memory[chunk.tensor])) + chunk.begin;
      count(begin, chunk.end - chunk.begin, exponent_of_scale, bins);
    });
    int64_t *row = counts + group.parts[chunk.tensor].row * TAMP_BINS;
    const std::lock_guard<std::mutex> lock(mutex);
    for (size_t bin = 0; bin < bins.size(); ++bin) row[bin] += bins[bin];
  });
}

// ---- other devices

// The numbers that are counted at once, which take about 50 bytes each meanwhile.
constexpr int64_t kBatch = int64_t{1} << 21;

// How many copies of the counts there are, and how many numbers these have together, at most. Neighbouring gradients,
// whose exponents are often the same, are counted in different copies, so that threads rarely wait for each other.
constexpr int64_t kMostCopies = 64;
constexpr int64_t kMostCounts = int64_t{1} << 21;

// The counts of the gradients of one device.
class DeviceCounts {
 public:
  DeviceCounts(at::Device device, int64_t rows)
      : device_(device),
        bins_(rows * TAMP_BINS),
        number_of_copies_(std::clamp<int64_t>(kMostCounts / bins_, 1, kMostCopies)) {
    const auto options = at::TensorOptions(at::kLong).device(device);
    counts_ = at::zeros({number_of_copies_ * bins_}, options);
    one_ = at::ones({1}, options);
  }

  at::Device device() const { return device_; }

  // `bin` is what is added to the exponents that frexp returns, on the device.
  void add(const Group &group, const Tensor &bin) {
    Batch batch;
    for (const auto &part : group.parts) {
      for (int64_t begin = 0; begin < part.numbers.numel();) {
        const int64_t taken = std::min(kBatch - batch.size, part.numbers.numel() - begin);
        batch.add(part.numbers.narrow(0, begin, taken), part.row * TAMP_BINS);
        begin += taken;
        if (batch.size == kBatch) count(std::exchange(batch, Batch()), bin);
      }
    }
    if (batch.size > 0) count(batch, bin);
  }

  Tensor sum() const { return counts_.view({number_of_copies_, bins_}).sum(0); }

 private:
  struct Batch {
    std::vector<Tensor> pieces;
    std::vector<int64_t> rows, ends;
    int64_t size = 0;

    void add(Tensor piece, int64_t row) {
      rows.push_back(row);
      size += piece.numel();
      ends.push_back(size);
      pieces.push_back(std::move(piece));
    }
  };

  void count(const Batch &batch, const Tensor &bin) {
    Tensor numbers = at::cat(batch.pieces);
    if (numbers.element_size() == 2) numbers = numbers.to(at::kFloat);
    Tensor bins = std::get<1>(at::frexp(numbers));
    bins.add_(bin).clamp_(TAMP_BIN_EXPONENTS, TAMP_BINS - 1);
    bins.masked_fill_(numbers.eq(0), TAMP_BIN_ZERO);
    bins.masked_fill_(numbers.isinf(), TAMP_BIN_INFINITE);
    bins.masked_fill_(numbers.ne(numbers), TAMP_BIN_NAN);
    number(batch.size);
    const Tensor places = rows(batch).add_(bins).add_(copies_.narrow(0, 0, batch.size));
    counts_.scatter_add_(0, places, one_.expand({batch.size}));
  }

  // The first bin of the row of every number.
  Tensor rows(const Batch &batch) const {
    const auto count = static_cast<int64_t>(batch.rows.size());
    const Tensor host = at::empty({2, count}, at::TensorOptions(at::kLong).pinned_memory(device_.is_cuda()));
    std::copy(batch.rows.begin(), batch.rows.end(), host.mutable_data_ptr<int64_t>());
    std::copy(batch.ends.begin(), batch.ends.end(), host.mutable_data_ptr<int64_t>() + count);
    tamp::keep_if_captured(host);
    const Tensor both = tamp::on_device(host, device_);
    // repeat_interleave would do the same, but may make the host wait.
    const Tensor pieces = at::searchsorted(both.select(0, 1), positions_.narrow(0, 0, batch.size), /*out_int32=*/false,
                                           /*right=*/true);
    return both.select(0, 0).index_select(0, pieces);
  }

  // Prepares for a batch of this size. No later batch of a group is larger than the first.
  void number(int64_t size) {
    if (positions_.defined() && positions_.size(0) >= size) return;
    positions_ = at::arange(size, counts_.options());
    copies_ = positions_.remainder(number_of_copies_).mul_(bins_);
  }

  at::Device device_;
  int64_t bins_, number_of_copies_;
  // The numbers from zero on, and the first bin of the copy in which each is counted.
  Tensor positions_, copies_;
  Tensor counts_, one_;
};

// ---- all devices

// The exponent of the scale, as frexp counts it, on the device of the scale.
Tensor exponent_by_frexp(const Tensor &scale) {
  return std::get<1>(at::frexp(scale.detach().reshape({}).to(at::kFloat)));
}

// Counts all gradients once. Returns a row of bins for each layer, on `home`.
Tensor count_all(const std::vector<Group> &groups, int64_t rows, const tamp_tensor *scale, at::Device home) {
  Tensor on_cpu;
  std::vector<DeviceCounts> devices;
  const Tensor exponent = scale == nullptr ? Tensor() : exponent_by_frexp(tamp::tensor(scale));
  for (const auto &group : groups) {
    // Numbers in [0.5, 1) have the exponent 0 for frexp, and -1 here.
    const bool scaled = exponent.defined() && !group.unscaled;
    if (group.device.is_cpu()) {
      if (!on_cpu.defined()) on_cpu = at::zeros({rows * TAMP_BINS}, at::kLong);
      count_on_cpu(group, scaled ? exponent.item<int>() - 1 : 0, on_cpu.mutable_data_ptr<int64_t>());
      continue;
    }
    const auto takes = [&](const DeviceCounts &counts) { return counts.device() == group.device; };
    const auto options = at::TensorOptions(at::kInt).device(group.device);
    DeviceCounts &counts = tamp::group_for(devices, takes, group.device, rows);
    counts.add(group, scaled ? tamp::on_device(exponent, group.device).neg().add_(kBinOfZero)
                             : at::full({}, kBinOfZero - 1, options));
  }
  Tensor sum = on_cpu.defined() ? tamp::on_device(on_cpu, home)
                                : at::zeros({rows * TAMP_BINS}, at::TensorOptions(at::kLong).device(home));
  for (const auto &device : devices) sum = sum.add(tamp::on_device(device.sum(), home));
  return sum;
}

// The device of the counts, which stays the same once it is not the CPU.
at::Device home_of(const tamp_tensor *counts, const std::vector<Group> &groups) {
  if (counts != nullptr && !tamp::tensor(counts).is_cpu()) return tamp::tensor(counts).device();
  for (const auto &group : groups) {
    if (!group.device.is_cpu()) return group.device;
  }
  return at::kCPU;
}

}  // namespace

extern "C" {

tamp_tensor *tamp_exponents_count(const tamp_tensor *counts, const tamp_counted_gradient *gradients, size_t count,
                                  int64_t rows, const tamp_tensor *scale, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const auto groups = groups_of(gradients, count);
    const at::Device home = home_of(counts, groups);
    const Tensor seen = count_all(groups, rows, scale, home);
    const Tensor bad = seen.view({rows, TAMP_BINS}).narrow(1, TAMP_BIN_INFINITE, 2).sum().gt(0).to(at::kLong);
    const Tensor next = at::cat({at::ones({1}, seen.options()), bad.reshape({1}), seen});
    if (counts == nullptr) return tamp::give(next);
    TORCH_CHECK(tamp::tensor(counts).sizes() == next.sizes(), "the counts of exponents have another size");
    return tamp::give(next.add(tamp::on_device(tamp::tensor(counts), home)));
  });
}

}  // extern "C"
