// The step of optimizers for which libtorch has no fused kernels, on devices other than the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "gradients/foreach_copy.h"
#include "optim/launch_groups.h"
#include "optim/scratch.h"
#include "optim/whole.h"

namespace tamp::optim {

// Whether a step of this algorithm is composed of libtorch's operations.
bool is_composed(uint8_t algorithm);

// Moves a parameter along the orthogonalized momentum of Muon. `factor` is the learning rate or, with rates on the
// device, the factor of these.
void move_along(const tamp_optim_options &o, double factor, const at::Tensor &parameter, const at::Tensor &direction);

// How the gradients are unscaled and when the step is skipped, in numbers on the device. Each may be undefined.
struct Prepared {
  Unscaling unscaling;
  at::Tensor found_inf;
  at::Tensor skip;  // a bool, for low-bit moments
};

// The step of a batch: its tensors are copied to scratch memory a chunk at a time, where one launch of an operation
// goes over all of them, and the results are copied back, unless the step is skipped. Half precision is computed in
// f32.
class ComposedStep {
 public:
  // Makes room in scratch memory: one row for each tensor of a parameter. `prepare` follows when it is allocated.
  ComposedStep(const Batch &batch, Scratch &scratch);
  void prepare(Scratch &scratch);

  void run(const Prepared &scale) const;

 private:
  struct Chunk {
    std::vector<at::Tensor> rows;
    Copies in;
    std::vector<at::Tensor> written, results;  // parts of the tensors, and of the rows that were computed for them
    std::vector<at::Tensor> rounded;           // of the rows of results in the dtype of the tensors
    std::vector<at::Tensor> numbered;          // the parts of the row of coefficients, one for each piece
    std::vector<size_t> tensors;               // of these parts
  };

  void list(const Piece &piece, Chunk &chunk) const;
  void fill(const Chunk &chunk, int coefficient) const;
  void compute(const Chunk &chunk, const Prepared &scale) const;
  void step(const Chunk &chunk) const;
  void write(const Chunk &chunk, const at::Tensor &found_inf) const;
  at::Tensor rounded_row(const Chunk &chunk, size_t place) const;
  size_t rows_needed() const;

  Batch batch_;
  at::ScalarType dtype_;     // of the arithmetic
  std::vector<int> places_;  // of the states that there are
  std::vector<Chunk> chunks_;
};

}  // namespace tamp::optim
