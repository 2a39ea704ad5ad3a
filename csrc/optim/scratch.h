// Scratch memory on a device, and the division of tensors into chunks that fit into it: many small tensors, or a part of
// a large one, at a time.
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

  // Returns this part of the tensor, or of another one with the same memory layout, or what belongs to it in a tensor
  // that has one element for each `per` of these.
  at::Tensor of(const at::Tensor &tensor, int64_t per = 1) const;

  // Returns the place in a row of scratch memory, in the shape that this part of `like` has.
  at::Tensor in(const at::Tensor &row, const at::Tensor &like, int64_t per = 1) const;
};

struct Pieces {
  std::vector<Piece> list;
  int64_t numbers = 0;  // including the gaps between pieces
};

// Divides tensors into pieces that fill chunks. The indices of all elements of a piece have the same upper 32 bits.
std::vector<Pieces> cut(const std::vector<at::Tensor> &tensors);

// Returns the size of the largest chunk.
int64_t largest_chunk(const std::vector<Pieces> &chunks);

// The scratch memory of one device, in rows, which several steps use in turn, one chunk after the other. Each step asks
// for its rows twice: before the memory for all of them is allocated, which makes room for its largest chunk, and after.
class Scratch {
 public:
  // Returns rows of a dtype for the numbers of a chunk, with an element for each `per` of them. Whoever asks gets the
  // same rows. They are on the meta device until the memory is allocated.
  std::vector<at::Tensor> rows(at::ScalarType dtype, size_t count, int64_t numbers, int64_t per = 1);
  at::Tensor row(at::ScalarType dtype, int64_t numbers, int64_t per = 1) { return rows(dtype, 1, numbers, per)[0]; }
  void allocate(at::Device device);

 private:
  struct Kind {
    at::ScalarType dtype;
    int64_t per;
    std::vector<at::Tensor> rows{};
  };

  std::vector<Kind> kinds_;
};

}  // namespace tamp
