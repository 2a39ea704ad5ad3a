// Loops over the memory of dense CPU tensors: checks, products and sums of gradients, conversions, and the updates of
// the optimizers.
//
// The arithmetic is libtorch's, operation by operation, so that the results have the same bits as those of its own
// kernels. What the loops save is the dispatch for each tensor and repeated passes over memory. Unlike libtorch's, the
// optimizers do not write to the gradients.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

#include "border/shim.h"

namespace tamp {

// The places of the states in tamp_optim_parameter::states, which the algorithms use differently.
enum StatePlace {
  kExpAvg = 0,          // Adam, AdamW, NAdam and Lion
  kExpAvgSq = 1,        // Adam, AdamW and NAdam
  kMaxExpAvgSq = 2,     // Adam and AdamW, with AMSGrad
  kExponents = 2,       // Adam and AdamW with 8-bit moments: one for each 32 elements
  kMomentumBuffer = 0,  // SGD with momentum, and Muon
  kSum = 0,             // Adagrad
  kSquareAvg = 0,       // RMSprop
  kBuffer = 1,          // RMSprop with momentum
  kGradAvg = 2,         // RMSprop that is centered
  kMuProduct = 2,       // NAdam: one f32
  kRowVar = 0,          // Adafactor, of parameters with two dimensions or more
  kColVar = 1,          // the same
  kVariance = 2,        // Adafactor, of others
  kStates = TAMP_OPTIM_STATES,
};

}  // namespace tamp

namespace tamp::kernels {

// The type in which numbers of type T are computed.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Returns whether any of `n` values is non-finite.
template <typename T>
bool any_non_finite(const T *values, int64_t n);

// Multiplies `n` values by `factor`. Returns whether any was non-finite before or, with `recheck`, after the
// multiplication.
template <typename T>
bool unscale(T *values, int64_t n, float factor, bool recheck);

// Multiplies `n` values by `factor`.
template <typename T>
void multiply(T *values, int64_t n, double factor);

// Returns the sum of the squares of `n` values that are multiplied by `factor`, where each product is rounded as by
// `unscale`. The sum is f64, in which no square of a narrower number overflows or underflows: for these it is non-finite
// only if a product is.
template <typename T>
double sum_of_squares(const T *values, int64_t n, float factor);

// Returns the sum of their absolute values in the same way.
template <typename T>
double sum_of_sizes(const T *values, int64_t n, float factor);

// Returns the sum of the powers of their absolute values, which are divided by `unit` before. Many times slower.
template <typename T>
double sum_of_powers(const T *values, int64_t n, float factor, double unit, double exponent);

// Returns the largest absolute value of `n` values that are multiplied by `factor` in the same way, or NaN if there is
// one.
template <typename T>
double largest(const T *values, int64_t n, float factor);

// How the cross entropy of a row of logits is computed. W is the type of its numbers.
template <typename W>
struct CrossEntropy {
  int64_t classes;
  W soft_cap;        // the logits are capped by `cap * tanh(logit / cap)`; 0: they are not
  const W *weights;  // of the classes; null: all are 1
  bool is_smooth;    // whether labels are smoothed, for which the sum of the weighted logits is needed
};

// What the loss of a row is computed from, after the cap.
template <typename W>
struct RowStatistics {
  W log_sum;   // the logarithm of the sum of the exponentials
  W target;    // the logit of the target
  W smoothed;  // the sum of the weighted logits, if labels are smoothed
};

// The gradient of a row: the probability of each class times a factor, minus its weight times another, and for the
// target minus a third.
template <typename W>
struct RowFactors {
  W probability, smoothing, target;
};

template <typename T>
RowStatistics<Wide<T>> row_statistics(const T *row, int64_t target, const CrossEntropy<Wide<T>> &loss);

// Puts the gradient of a row in the place of its logits.
template <typename T>
void row_gradient(T *row, int64_t target, Wide<T> log_sum, const RowFactors<Wide<T>> &factors,
                  const CrossEntropy<Wide<T>> &loss);

// Packs a row of numbers in eight bits, and returns the factor of its codes. unpack_row restores them, each within 1/16 of
// its size or 2^-16 of the largest: infinities stay, a NaN makes all of them NaN, and finite numbers stay finite.
template <typename T>
float pack_row(const T *from, uint8_t *codes, int64_t n);
template <typename T>
void unpack_row(const uint8_t *codes, float factor, T *to, int64_t n);

// A sum of squares of f64 numbers, whose own squares may overflow or underflow: `sum` times the square of `largest`, the
// largest absolute value. As in LAPACK's nrm2.
class ScaledSum {
 public:
  void add(double x) { add(x, 1); }
  void add(const ScaledSum &other);
  // Infinite or NaN only if a number is, or if the root is too large for f64.
  double root() const;

 private:
  void add(double size, double sum);

  double largest_ = 0, sum_ = 0;
  bool nan_ = false;
};

// Returns the same sum for values whose squares overflow or underflow. Several times slower than `sum_of_squares`.
template <typename T>
ScaledSum scaled_sum_of_squares(const T *values, int64_t n, float factor);

// How an update unscales a gradient.
struct GradientScale {
  float divisor = 1;  // the loss scale, if gradients are not clipped
  float factor = 1;   // the reciprocal of the loss scale, if they are
  double clip = 1;    // the factor of clipping
};

// The reciprocal of a loss scale, rounded as on the host.
inline float reciprocal(float scale) { return static_cast<float>(1 / static_cast<double>(scale)); }

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

struct RmsProp {
  double lr, alpha, eps, weight_decay, momentum;
  bool centered, maximize;
};

struct Lion {
  double lr, beta1, beta2, weight_decay;
  bool maximize;
};

struct NAdam {
  double beta1, beta2, eps, weight_decay,
      keep;                              // `keep` is 1 - lr * weight_decay if that is decoupled, and 1 otherwise
  double correction2;                    // 1 - beta2^step
  double along_gradient, along_exp_avg;  // what a gradient and its average are multiplied by
  bool decoupled, maximize;
};

// An update along a direction that was computed from whole tensors.
struct Adafactor {
  double keep, rate;
};

struct Muon {
  double lr, rate, momentum, weight_decay;  // the rate is the learning rate that is adjusted to the shape
};

// A range of the memory of a parameter, its gradient and its state. Its length is a multiple of 64 bytes unless it ends
// the tensor.
template <typename T>
struct Slice {
  T *parameter;
  const T *gradient;
  T *states[kStates];
  int64_t n;
  const void *direction = nullptr;  // of Muon, in bf16, and of Adafactor, in Wide<T>
};

// Low-bit moments, as docs/low_bit_moments.md defines them: those of Adam and AdamW, and Muon's momentum in bf16. With 8
// bits, 32 consecutive elements of a tensor are a block, which has one exponent.
constexpr int64_t kCodeBlock = 32;
// The index of an element enters the dither modulo this.
constexpr int64_t kDitherPeriod = 256;
// The number of blocks of a tensor, each with one exponent.
constexpr int64_t code_blocks(int64_t numbers) { return (numbers + kCodeBlock - 1) / kCodeBlock; }

// The multipliers of the dither. In step t, the word of element i is t * kExpAvg or t * kExpAvgSq, plus
// (i mod kDitherPeriod) * kIndex, in 32-bit arithmetic; its upper bits are added to a number before its lower bits are
// dropped. Muon's momentum is a first moment, too.
struct Dither {
  static constexpr uint32_t kIndex = 0x9e3779b9, kExpAvg = 0xbb67ae85, kExpAvgSq = 0x6a09e667;
};

// The largest code of a first moment: that of twice the largest |exp_avg| / sqrt(exp_avg_sq) which exact moments can
// have, rounded down. No stored moments then make an update of more than twice the largest one of exact moments.
uint32_t largest_code(double beta1, double beta2);

// The scalars and dither tables of a step with low-bit moments. `keep` and the betas are rounded to f32, as on other
// devices.
struct LowBit {
  // `width` is 8 or 16 bits for a moment. `step` is the number of this step, from 1 on.
  LowBit(const Adam &options, uint64_t step, int width);

  float lerp, beta2, one_minus_beta2, keep, minus_step_size, eps, weight_decay;
  uint32_t largest;
  bool maximize;
  alignas(64) uint32_t exp_avg_dither[kDitherPeriod], exp_avg_sq_dither[kDitherPeriod];
};

// The options and the dither table of a step of Muon with a bf16 momentum buffer.
struct LowBitMuon {
  LowBitMuon(const Muon &options, uint64_t step);

  Muon options;
  alignas(64) uint32_t dither[kDitherPeriod];
};

// A range of the memory of a parameter, its gradient and its moments, which begins at a multiple of kDitherPeriod.
struct EightBitSlice {
  float *parameter;
  const float *gradient;
  int8_t *exp_avg;
  uint8_t *exp_avg_sq, *exponents;
  int64_t n;
};
struct BFloat16Slice {
  float *parameter;
  const float *gradient;
  c10::BFloat16 *exp_avg, *exp_avg_sq;
  int64_t n;
};
struct MuonSlice {
  float *parameter;
  const float *gradient;
  c10::BFloat16 *momentum_buffer;
  const c10::BFloat16 *orthogonal;
  int64_t n;
};
void update(const LowBit &options, const GradientScale &scale, const EightBitSlice &slice);
void update(const LowBit &options, const GradientScale &scale, const BFloat16Slice &slice);
void update(const LowBitMuon &options, const GradientScale &scale, const MuonSlice &slice);

// Convert half-precision numbers to f32, and back, rounded to nearest with ties to even.
template <typename T>
void widen(const T *from, float *to, int64_t n);
template <typename T>
void narrow(const float *from, T *to, int64_t n);

// `split` writes the bf16 number that is nearest to each f32 number, with ties away from zero, and the lower 16 bits of
// the f32 number. `join` restores the f32 number from the two exactly.
void join(const c10::BFloat16 *high, const int16_t *low, float *to, int64_t n);
void split(const float *from, c10::BFloat16 *high, int16_t *low, int64_t n);

// Rounds f32 numbers stochastically to one of the two neighbouring bf16 numbers. The probability of each falls linearly
// with its distance, from one to zero, so that the rounding is right on average. The random numbers depend on `seed`
// and on the index of a number. The first index is `first`, a multiple of kRandomBlock: within a block, a number and the
// one half a block later use the two halves of one random word.
constexpr int64_t kRandomBlock = 32;
void round_at_random(const float *from, c10::BFloat16 *to, int64_t n, uint64_t seed, int64_t first);

// Moves `n` averages towards the parameters by a share of the way, as libtorch's lerp does.
template <typename T>
void lerp(double weight, Wide<T> *averages, const T *parameters, int64_t n);

// Updates a parameter and its state in place. The gradient is only read.
template <typename T>
void update(const Adam &options, const GradientScale &scale, const Slice<T> &slice);
template <typename T>
void update(const Sgd &options, const GradientScale &scale, const Slice<T> &slice);
template <typename T>
void update(const Adagrad &options, const GradientScale &scale, const Slice<T> &slice);
template <typename T>
void update(const RmsProp &options, const GradientScale &scale, const Slice<T> &slice);
template <typename T>
void update(const Lion &options, const GradientScale &scale, const Slice<T> &slice);
template <typename T>
void update(const NAdam &options, const GradientScale &scale, const Slice<T> &slice);
template <typename T>
void update(const Adafactor &options, const GradientScale &scale, const Slice<T> &slice);
template <typename T>
void update(const Muon &options, const GradientScale &scale, const Slice<T> &slice);

}  // namespace tamp::kernels
