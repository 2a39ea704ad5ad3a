// Tensors in chunks of scratch memory on a device: many small ones, or a part of a large one, at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tamp {

// The numbers of a chunk at most.
constexpr int64_t kChunk = int64_t{1} << 20;

// A piece begins at a multiple of this many numbers, in scratch memory and in its tensor.
constexpr int64_t kRow = 64;

// A part of the memory of a dense tensor, and its place in scratch memory.
struct Piece {
  size_t tensor;
  int64_t begin, count, place;
  bool is_whole;

  // The part of the tensor, or of another that lies in memory as it does.
  at::Tensor of(const at::Tensor &tensor) const;

  // The place in scratch memory, in the shape of the part of `like`.
  at::Tensor in(const at::Tensor &scratch, const at::Tensor &like) const;
};

struct Pieces {
  std::vector<Piece> list;
  int64_t numbers = 0;  // with the gaps between them
};

// Cuts tensors, whose sizes are given, into pieces that fill chunks. The upper 32 bits of the indices of a piece's
// numbers are the same.
std::vector<Pieces> cut(const std::vector<int64_t> &sizes);

}  // namespace tamp
