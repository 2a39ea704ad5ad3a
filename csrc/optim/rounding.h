// Conversions between f32 numbers and bf16 parameters on devices other than the CPU. libtorch's operations compute
// there what the loops of kernels/masters.cpp compute on the CPU. They work in scratch memory that is allocated
// beforehand. Nothing is allocated once a step has begun to change tensors, so that it cannot fail for lack of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tamp::rounding {

// Joins bf16 numbers and their remainders, both as i32, to the bits of f32 numbers, which replace `low`.
void join(const at::Tensor &high, const at::Tensor &low);

// Rounds f32 numbers to the nearest bf16 numbers, with ties away from zero. Writes the bits of these to `high`, as i32,
// and leaves the remainders in the lower halves of `numbers`. `mask` is scratch memory of as many booleans.
void split(const at::Tensor &numbers, const at::Tensor &high, const at::Tensor &mask);

// Rounds f32 numbers stochastically to one of the two neighbouring bf16 numbers, whose bits replace them, as i32.
// `random` has 16 random bits for each number, as i32. `mask` is scratch memory of as many booleans.
void round_at_random(const at::Tensor &numbers, const at::Tensor &random, const at::Tensor &mask);

// Consecutive numbers of a parameter in scratch memory.
struct Range {
  uint64_t seed;    // of the parameter
  at::Tensor step;  // the number of steps before this one
  int64_t first;    // the index of the first number in the parameter; all indices have the same upper 32 bits
  int64_t place;    // in scratch memory
  int64_t count;
};

// Draws the random bits of kernels::round_at_random, for ranges that fill chunks of scratch memory.
class Randoms {
 public:
  // `memory` receives the results. It is i32 and has room for the numbers of a chunk.
  Randoms(const std::vector<std::vector<Range>> &chunks, const at::Tensor &memory);

  // Returns 16 bits for each number of a chunk. They are valid until the next call or any other use of the memory.
  at::Tensor draw(size_t chunk) const;

 private:
  struct Part {
    int64_t first, ranges, rows;
  };

  void upload(const std::vector<std::vector<Range>> &chunks);
  void advance_seeds(const std::vector<std::vector<Range>> &chunks);
  at::Tensor halves(int64_t rows) const;

  std::vector<Part> parts_;
  int64_t ranges_ = 0;
  at::Tensor memory_, words_, spare_;
  at::Tensor table_;   // for each range: both halves of its seed, then both halves of its first index
  at::Tensor ends_;    // for each range: the row after its last one
  at::Tensor places_;  // 0, 1, 2 …, for each word
  at::Tensor range_;   // for each row of a chunk: the range that it belongs to
  at::Tensor rows_;    // for each row of a chunk: the table's row for its range
};

}  // namespace tamp::rounding
