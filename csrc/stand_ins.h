// The f32 numbers of half parameters while libtorch's kernels update these, on devices other than the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "copies.h"
#include "optim.h"
#include "pieces.h"
#include "rounding.h"

namespace tamp::optim {

// f32 tensors in the place of half parameters and their gradients, for kernels that know nothing of masters. They lie in
// the scratch memory of a chunk, all of which is allocated when they are made: for each of its numbers 4 bytes with f32
// copies, 9 with remainders, and 18 for parameters that are rounded at random.
class StandIns {
 public:
  // Whether an entry needs one: kernels update an f32 copy itself, if its gradient is f32.
  static bool are_needed(const Entry &e);

  // For entries of one device that need them.
  explicit StandIns(const std::vector<Entry> &entries);

  size_t chunks() const { return chunks_.size(); }

  // What is to be updated in a chunk between `fill` and `write_back`, which writes the results to the parameters and
  // remainders. f32 copies are updated themselves, and write back nothing. Without an update nothing changes.
  const std::vector<Entry> &entries(size_t chunk) const { return chunks_[chunk].entries; }
  void fill(size_t chunk) const;
  void write_back(size_t chunk) const;

 private:
  struct Chunk {
    uint8_t kind = TAMP_MASTER_NONE;
    int64_t numbers = 0;
    size_t random = 0;  // its place among those that are rounded at random, if it is one
    std::vector<Entry> entries;
    Copies in, gradients, out;
  };

  using List = std::vector<const Entry *>;
  void allocate(const std::vector<List> &lists, const std::vector<std::vector<Pieces>> &cuts);
  void add(const List &list, const Pieces &pieces);
  Entry entry(const Entry &whole, const Piece &piece, Copies &widened) const;

  std::vector<Chunk> chunks_;
  size_t random_ = 0;   // how many of them are rounded at random
  at::Tensor numbers_;  // f32
  at::Tensor words_;    // i32: what numbers are made of, then their gradients, then what they are rounded to
  at::Tensor mask_;
  std::optional<rounding::Randoms> randoms_;
};

}  // namespace tamp::optim
