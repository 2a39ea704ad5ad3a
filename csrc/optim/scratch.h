// Division of tensors into chunks that fit into scratch memory on a device: many small tensors, or a part of a large
// one, at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tamp {

// The largest number of elements in a chunk.
constexpr int64_t kChunk = int64_t{1} << 20;

// A piece begins at a multiple of this many elements, both in scratch memory and in its tensor.
constexpr int64_t kRow = 256;

// A part of the memory of a dense tensor, and its place in scratch memory.
struct Piece {
  size_t tensor;
  int64_t begin, count, place;
  bool is_whole;

  // Returns this part of the tensor, or of another one with the same memory layout.
  at::Tensor of(const at::Tensor &tensor) const;

  // Returns what belongs to this part in a tensor that has one element for each `size` of these.
  at::Tensor of_blocks(const at::Tensor &tensor, int64_t size) const;

  // Returns the place in scratch memory, in the shape that this part of `like` has.
  at::Tensor in(const at::Tensor &scratch, const at::Tensor &like) const;
};

struct Pieces {
  std::vector<Piece> list;
  int64_t numbers = 0;  // including the gaps between pieces
};

// Divides tensors, whose sizes are given, into pieces that fill chunks. The indices of all elements of a piece have the
// same upper 32 bits.
std::vector<Pieces> cut(const std::vector<int64_t> &sizes);

}  // namespace tamp
