// Division of tensors into chunks that fit into scratch memory.

#include "optim/scratch.h"

#include <ATen/ops/as_strided.h>

#include <algorithm>

namespace tamp {

at::Tensor Piece::of(const at::Tensor &tensor) const {
  return is_whole ? tensor : at::as_strided(tensor, {count}, {1}, tensor.storage_offset() + begin);
}

at::Tensor Piece::of_blocks(const at::Tensor &tensor, int64_t size) const {
  const int64_t blocks = (count + size - 1) / size;
  return is_whole ? tensor : at::as_strided(tensor, {blocks}, {1}, tensor.storage_offset() + begin / size);
}

at::Tensor Piece::in(const at::Tensor &scratch, const at::Tensor &like) const {
  if (!is_whole) return scratch.narrow(0, place, count);
  return at::as_strided(scratch, like.sizes(), like.strides(), scratch.storage_offset() + place);
}

std::vector<Pieces> cut(const std::vector<int64_t> &sizes) {
  constexpr int64_t kPage = int64_t{1} << 32;
  std::vector<Pieces> out;
  for (size_t tensor = 0; tensor < sizes.size(); ++tensor) {
    const int64_t size = sizes[tensor];
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

}  // namespace tamp
