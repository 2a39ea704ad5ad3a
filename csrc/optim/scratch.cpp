// Scratch memory, and the division of tensors into chunks that fit into it.

#include "optim/scratch.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "border/groups.h"

namespace tamp {

at::Tensor Piece::of(const at::Tensor &tensor, int64_t per) const {
  const int64_t elements = (count + per - 1) / per;
  return is_whole ? tensor : at::as_strided(tensor, {elements}, {1}, tensor.storage_offset() + begin / per);
}

at::Tensor Piece::in(const at::Tensor &row, const at::Tensor &like, int64_t per) const {
  if (!is_whole) return row.narrow(0, place / per, (count + per - 1) / per);
  return at::as_strided(row, like.sizes(), like.strides(), row.storage_offset() + place / per);
}

std::vector<Pieces> cut(const std::vector<at::Tensor> &tensors) {
  constexpr int64_t kPage = int64_t{1} << 32;
  std::vector<Pieces> out;
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const int64_t size = tensors[tensor].numel();
    for (int64_t begin = 0, end = 0; begin < size; begin = end) {
      if (out.empty() || out.back().numbers == kChunk) out.emplace_back();
      Pieces &pieces = out.back();
      end = std::min({size, begin + kChunk - pieces.numbers, (begin / kPage + 1) * kPage});
      pieces.list.push_back({tensor, begin, end - begin, pieces.numbers, end - begin == size});
      pieces.numbers += (end - begin + kRow - 1) / kRow * kRow;
    }
  }
  return out;
}

int64_t largest_chunk(const std::vector<Pieces> &chunks) {
  int64_t out = 0;
  for (const auto &pieces : chunks) out = std::max(out, pieces.numbers);
  return out;
}

std::vector<at::Tensor> Scratch::rows(at::ScalarType dtype, size_t count, int64_t numbers, int64_t per) {
  const auto takes = [&](const Kind &kind) { return kind.dtype == dtype && kind.per == per; };
  auto &rows = group_for(kinds_, takes, dtype, per).rows;
  const int64_t size = numbers / per;
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < count; ++i) {
    if (i == rows.size()) rows.push_back(at::empty({size}, at::TensorOptions(at::kMeta).dtype(dtype)));
    if (rows[i].is_meta() && rows[i].numel() < size) rows[i] = at::empty({size}, rows[i].options());
    out.push_back(rows[i].narrow(0, 0, size));
  }
  return out;
}

void Scratch::allocate(at::Device device) {
  for (auto &kind : kinds_) {
    for (auto &row : kind.rows) row = at::empty(row.sizes(), row.options().device(device));
  }
}

}  // namespace tamp
