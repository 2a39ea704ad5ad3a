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

// The tiles of 256 numbers in a chunk, each with its own dither: what the steps of one device share besides scratch
// memory.
struct Tiles {
  int64_t most = 0;   // in a chunk
  at::Tensor index;   // i32: 0 to 255, each times Dither::kIndex
  at::Tensor places;  // i32: 0, 1, 2 …, for each tile

  void allocate(at::Device device);
};

// The step of a batch: its tensors are copied to scratch memory a chunk at a time, where it computes what the loops of
// kernels/low_bit.cpp compute on the CPU, bit by bit but for one case: a fused multiply-add is a product and a sum in
// f64, which rounds twice and differs about once in 2^29. For Muon, it takes the operations of `ComposedStep`.
class LowBitStep {
 public:
  // Makes room in scratch memory: about 36 bytes for each element of a chunk with 8-bit moments, and 41 with bf16 ones.
  // `prepare` follows when it is allocated.
  LowBitStep(const Batch &batch, Scratch &scratch, Tiles &tiles);
  void prepare(Scratch &scratch, const Tiles &tiles);

  void run(const Prepared &scale) const;

 private:
  // The rows of a chunk, and what is copied to and from them.
  struct Chunk {
    codes::Rows words;
    at::Tensor parameter, gradient, wide;   // f32, f32 and f64
    at::Tensor moments, squares;            // f32, in `words`
    std::vector<at::Tensor> before, after;  // the states, by StatePlace
    at::Tensor mask;                        // bool, for bf16
    at::Tensor index, places, range;        // i32: of Tiles, and for each tile the piece that it belongs to
    at::Tensor tiles;                       // i32: for each tile, the row of `numbers` for its piece
    at::Tensor ends;                        // i32: for each piece, the tile after its last one
    at::Tensor numbers;     // i32: for each piece, the bits of the step's size and of eps, and the dithers' first words
    bool has_tail = false;  // whether a block has fewer than 32 numbers
    Copies in, out;
  };

  // How many of a parameter's elements share an element of a state.
  int64_t per(int place) const;
  Chunk chunk(int64_t tiles, Scratch &scratch) const;
  void list(const Piece &piece, Chunk &chunk) const;
  void upload(const std::vector<Pieces> &cuts);
  at::Tensor step_numbers() const;
  void unscale(const Chunk &x, const Prepared &scale) const;
  void update(const Chunk &x, const at::Tensor &to) const;
  void update_by_muon(const Chunk &x, const at::Tensor &to) const;
  void decode(const Chunk &x) const;
  void encode(const Chunk &x) const;

  Batch batch_;
  bool is_coded_, is_muon_;
  std::vector<int> places_;  // of the states
  std::vector<Chunk> chunks_;
};

}  // namespace tamp::optim
