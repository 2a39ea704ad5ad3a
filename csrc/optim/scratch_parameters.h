// Stand-ins for half-precision parameters while libtorch's kernels update them, on devices other than the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "gradients/foreach_copy.h"
#include "optim/optim.h"
#include "optim/rounding.h"
#include "optim/scratch.h"

namespace tamp::optim {

// f32 tensors in place of half-precision parameters and their gradients, for kernels that do not support master
// weights. They are in scratch memory for one chunk, which the constructor allocates: for each number of a chunk 4
// bytes with f32 copies, 9 with remainders, and 15 with stochastic rounding.
class StandIns {
 public:
  // Whether an entry needs a stand-in. Kernels update an f32 copy directly if its gradient is f32.
  static bool are_needed(const Entry &e);

  // Takes entries of one device, all of which need stand-ins.
  explicit StandIns(const std::vector<Entry> &entries);

  size_t chunks() const { return chunks_.size(); }

  // Returns what is to be updated in a chunk between `fill` and `write_back`, which writes the results to the
  // parameters and remainders. f32 copies are updated directly, and nothing is written back for them. Without an update
  // in between, nothing changes.
  const std::vector<Entry> &entries(size_t chunk) const { return chunks_[chunk].entries; }
  void fill(size_t chunk) const;
  void write_back(size_t chunk) const;

 private:
  struct Chunk {
    uint8_t kind = TAMP_MASTER_NONE;
    // i32: in turn the upper halves of numbers, their gradients, and random bits or rounded numbers.
    at::Tensor words;
    at::Tensor numbers, mask;  // f32 and bool, except with f32 copies
    size_t random = 0;         // its place among the chunks with stochastic rounding, if it is one of them
    std::vector<Entry> entries;
    Copies in, gradients, out;
  };

  using List = std::vector<const Entry *>;
  Chunk chunk(uint8_t kind, int64_t numbers);
  void add(const List &list, const Pieces &pieces);
  static Entry entry(const Entry &whole, const Piece &piece, const Chunk &chunk, Copies &widened);

  std::vector<Chunk> chunks_;
  size_t random_ = 0;  // how many of them have stochastic rounding
  Scratch scratch_;
  std::optional<rounding::Randoms> randoms_;
};

}  // namespace tamp::optim
