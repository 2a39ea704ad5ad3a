// Plain loops over the memory of dense CPU tensors: the passes over gradients and the updates of the optimizers.
//
// The arithmetic is libtorch's, operation by operation, so that the results have the same bits as those of its own
// kernels; what the loops save is the dispatch of each tensor and the trips to memory. In contrast to libtorch's the
// optimizers do not write the gradients back.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "shim.h"

namespace tamp {

// The places of the states in tamp_optim_parameter::states, which the algorithms use differently.
enum StatePlace {
  kExpAvg = 0,          // Adam and AdamW
  kExpAvgSq = 1,        // Adam and AdamW
  kMaxExpAvgSq = 2,     // Adam and AdamW, with AMSGrad
  kMomentumBuffer = 0,  // SGD with momentum
  kSum = 0,             // Adagrad
  kStates = TAMP_OPTIM_STATES,
};

}  // namespace tamp

namespace tamp::kernels {

// Whether any of `n` values is infinite or NaN.
template <typename T>
bool any_non_finite(const T *values, int64_t n);

// Multiplies `n` values by `factor`; returns whether any was infinite or NaN before, or with `recheck` after.
template <typename T>
bool unscale(T *values, int64_t n, float factor, bool recheck);

// Multiplies `n` values by `factor`.
template <typename T>
void multiply(T *values, int64_t n, double factor);

// Sums the squares of `n` values times `factor`, each product rounded as `unscale` rounds it. In f64, where no square
// of a narrower number overflows: the sum is finite unless a product is not.
template <typename T>
double sum_of_squares(const T *values, int64_t n, float factor);

// How a gradient becomes the number that the update takes.
struct GradientScale {
  float divisor = 1;  // the loss scale, where that is all
  float factor = 1;   // or its reciprocal
  double clip = 1;    // and the factor of clipping
};

// The options of Adam and AdamW, and what follows from the number of steps.
struct Adam {
  double lr, beta1, beta2, eps, weight_decay;
  double correction1, correction2;  // 1 - beta1^step and 1 - beta2^step
  bool amsgrad, maximize;
  bool decoupled;  // the weight decay of AdamW
};

struct Sgd {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, maximize;
  bool first_step;  // initializes the momentum buffer with the gradient
};

struct Adagrad {
  double lr, lr_decay, eps, weight_decay, step;
  bool maximize;
};

// The memory of a parameter, its gradient and its state. A range of it is a multiple of 64 bytes or ends the tensor.
template <typename T>
struct Slice {
  T *parameter;
  const T *gradient;
  T *states[kStates];
  int64_t n;
};

// Numbers in half precision as f32, and back, rounded to nearest, ties to even.
template <typename T>
void widen(const T *from, float *to, int64_t n);
template <typename T>
void narrow(const float *from, T *to, int64_t n);

// An f32 as the bf16 nearest to it, the larger of two, and the 16 bits that this lacks. The two make it again, exactly.
void join(const c10::BFloat16 *high, const int16_t *low, float *to, int64_t n);
void split(const float *from, c10::BFloat16 *high, int16_t *low, int64_t n);

// f32 rounded to one of the two bf16 around it, to each with a probability of one minus its distance, in units of the
// distance of the two. The random numbers depend on `seed` and the index, the first of which is `first`.
void round_at_random(const float *from, c10::BFloat16 *to, int64_t n, uint64_t seed, int64_t first);

// Updates a parameter and its state in place. The gradient is only read.
template <typename T>
void update(const Adam &options, const GradientScale &scale, const Slice<T> &slice);
template <typename T>
void update(const Sgd &options, const GradientScale &scale, const Slice<T> &slice);
template <typename T>
void update(const Adagrad &options, const GradientScale &scale, const Slice<T> &slice);

}  // namespace tamp::kernels
