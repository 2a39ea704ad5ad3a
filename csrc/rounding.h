// The bits of f32 numbers on devices other than the CPU: libtorch's operations compute there what kernel_masters.cpp does
// in loops. All of it happens in scratch memory that was allocated before; nothing here allocates once a step changes
// something, so that nothing fails there for lack of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tamp::rounding {

// Makes the words of f32 numbers from bf16 numbers and their remainders, both as i32. They take the place of `low`.
void join(const at::Tensor &high, const at::Tensor &low);

// Rounds f32 numbers to the nearest bf16, the larger of two. `high` becomes these, as i32; the lower halves of `numbers`
// become the remainders. `mask` has as many booleans.
void split(const at::Tensor &numbers, const at::Tensor &high, const at::Tensor &mask);

// Rounds f32 numbers to one of the two bf16 around them. Their words become these, as i32. `random` has 16 random bits
// for each, as i32; `mask` has as many booleans.
void round_at_random(const at::Tensor &numbers, const at::Tensor &random, const at::Tensor &mask);

// Numbers of a parameter that lie one behind the other in scratch memory.
struct Range {
  uint64_t seed;    // the parameter's
  at::Tensor step;  // before this step
  int64_t first;    // the index of the first number in its parameter, whose last has the same upper 32 bits
  int64_t place;    // in scratch memory
  int64_t count;
};

// The random bits that kernels::round_at_random draws, for ranges that fill chunks of scratch memory.
class Randoms {
 public:
  // `memory` takes the results: i32, with room for the numbers of a chunk and one more for each row.
  Randoms(const std::vector<std::vector<Range>> &chunks, const at::Tensor &memory);

  // Returns 16 bits for each number of a chunk. They stay until the next are drawn or the memory is used otherwise.
  at::Tensor draw(size_t chunk) const;

 private:
  struct Part {
    int64_t first, ranges, rows;
  };

  void upload(const std::vector<std::vector<Range>> &chunks);
  void advance_seeds(const std::vector<std::vector<Range>> &chunks);

  std::vector<Part> parts_;
  int64_t ranges_ = 0;
  at::Tensor memory_, spare_;
  at::Tensor table_;   // for each range the two halves of its seed, the lower half of its first index, the upper half
  at::Tensor ends_;    // for each range the row behind its last
  at::Tensor places_;  // 0, 1, 2 …
  at::Tensor range_;   // for each row of a chunk the range that it belongs to
  at::Tensor rows_;    // for each row of a chunk what the table says of its range
};

}  // namespace tamp::rounding
