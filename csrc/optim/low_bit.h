// The step with low-bit moments, on devices other than the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "gradients/foreach_copy.h"
#include "optim/composed.h"
#include "optim/eight_bit.h"
#include "optim/launch_groups.h"
#include "optim/scratch.h"

namespace tamp::optim {

// Scratch memory, which the steps of one device use in turn: about 36 bytes for each element of a chunk with 8-bit
// moments, and 41 with bf16 ones.
struct LowBitRows {
  int64_t numbers = 0;
  bool has_codes = false, has_bf16 = false;
  codes::Rows words;
  at::Tensor parameter, gradient, wide;               // f32, f32 and f64
  at::Tensor old_codes[kStates], new_codes[kStates];  // i8, u8 and, for each block, a u8
  at::Tensor old_bf16[2], new_bf16[2], mask;          // of each number
  at::Tensor index;                                   // i32: 0 to 255, each times Dither::kIndex
  at::Tensor places, range, of_tiles;                 // i32, for each tile of 256 numbers

  // Makes room for a chunk.
  void reserve(int64_t chunk, bool is_coded);
  void allocate(at::Device device);
};

// The step of a batch: its tensors are copied to scratch memory a chunk at a time, where it computes what the loops of
// kernels/low_bit.cpp compute on the CPU, bit by bit but for one case: a fused multiply-add is a product and a sum in
// f64, which rounds twice and differs about once in 2^29. For Muon, it takes the operations of `ComposedStep`.
class LowBitStep {
 public:
  // Reserves scratch memory. `prepare` follows when it has been allocated.
  LowBitStep(const Batch &batch, LowBitRows &rows);
  void prepare(const LowBitRows &rows);

  void run(const Prepared &scale) const;

 private:
  struct Chunk {
    int64_t numbers = 0;
    int64_t first_piece = 0, pieces = 0;
    bool has_tail = false;  // whether a block has fewer than 32 numbers
    Copies in, out;
  };

  // The rows of a chunk.
  struct Views {
    codes::Rows words;
    at::Tensor parameter, gradient, wide, moments, squares;
    std::vector<at::Tensor> before, after;  // the states
    at::Tensor mask, index, tiles;
  };

  void add(const Pieces &pieces, const LowBitRows &rows);
  void upload(const std::vector<Pieces> &cuts);
  at::Tensor step_numbers() const;
  Views views(const Chunk &chunk) const;
  void unscale(const Views &x, const Prepared &scale) const;
  void update(const Views &x, const at::Tensor &to) const;
  void update_by_muon(const Views &x, const at::Tensor &to) const;
  void decode(const Views &x) const;
  void encode(const Views &x) const;

  Batch batch_;
  bool is_coded_, is_muon_;
  std::vector<int> places_;  // of the states that have an element for each of the parameter's
  std::vector<Chunk> chunks_;
  LowBitRows rows_;
  at::Tensor ends_;     // i32: for each piece, the tile after its last one
  at::Tensor numbers_;  // i32: for each piece, the bits of the step's size and of eps, and the dithers' first words
};

}  // namespace tamp::optim
