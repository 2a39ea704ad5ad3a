// The C ABI of tch-amp. src/sys.rs repeats every declaration in the same order, and tests/abi.rs compares the two
// files.
//
// This holds for all functions:
//
// - No function throws: all of them are noexcept.
// - A function that can fail takes `char **err` as its last argument. On failure it writes a message there, which was
//   allocated with malloc and which the caller frees with tamp_string_free, and returns zero or null. On success it
//   leaves *err unchanged.
// - Tensors are borrowed for the length of the call. They may be null or undefined only where a comment says so. A
//   tensor that a function returns, or writes to an array of results, belongs to the caller.
// - `count` is the length of every array without a length of its own.
// - Booleans are uint8_t and are zero or one. Device types are c10::DeviceType and dtypes are c10::ScalarType, both as
//   int8_t.
// - A function synchronizes only where its comment says so: then the host stops until the device has finished.
//   libtorch's operations on sparse tensors may synchronize in addition.
// - A function computes outside of the autocast regions of the calling thread, unless its comment says otherwise.
// - Only C types cross the border.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TAMP_NOEXCEPT noexcept
extern "C" {
#else
#define TAMP_NOEXCEPT
#endif

// An at::Tensor, behind the pointers that tch uses.
typedef struct tamp_tensor tamp_tensor;

// Frees a message that a function wrote to `err`. Null is allowed.
void tamp_string_free(char *text) TAMP_NOEXCEPT;

// Returns a copy of `text`, which a callback writes to its `err`.
char *tamp_string_new(const char *text) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------------- border/device.cpp
// These functions initialize CUDA, choose the precision of f32 matrix products, and bring a flag from a device to the
// host without synchronizing.

// Returns whether this libtorch has its CUDA library linked in.
uint8_t tamp_cuda_is_linked(void) TAMP_NOEXCEPT;

// Returns the version of the libtorch for which the shim was compiled, such as "2.13.0".
const char *tamp_libtorch_version(void) TAMP_NOEXCEPT;

// Initializes CUDA. Fails with libtorch's own message where CUDA cannot be used.
void tamp_cuda_initialize(char **err) TAMP_NOEXCEPT;

// Whether a CUDA device has instructions for bf16; libtorch emulates them, slowly, on one that has not.
uint8_t tamp_cuda_has_bf16(int8_t device, char **err) TAMP_NOEXCEPT;

enum { TAMP_MATMUL_HIGHEST = 0, TAMP_MATMUL_HIGH = 1, TAMP_MATMUL_MEDIUM = 2 };

// Sets how precise f32 matrix products are, in all threads: with TAMP_MATMUL_HIGH they may use TensorFloat-32 on GPUs
// that have it. Returns how precise they were.
uint8_t tamp_matmul_precision(uint8_t precision, char **err) TAMP_NOEXCEPT;

enum { TAMP_REDUCTION_FP16 = 1, TAMP_REDUCTION_BF16 = 2 };

// Sets whether cuBLAS may round the partial sums of fp16 and bf16 matrix products, in all threads: `allowed` is a sum of
// TAMP_REDUCTION_…. Returns what was allowed.
uint8_t tamp_reduced_precision_reduction(uint8_t allowed, char **err) TAMP_NOEXCEPT;

// An asynchronous copy of a tensor from a GPU to pinned memory of the host.
typedef struct tamp_arrival tamp_arrival;

// Starts to copy a tensor.
tamp_arrival *tamp_arrival_new(const tamp_tensor *source, char **err) TAMP_NOEXCEPT;

// Returns 0 until the copy is complete. Then it returns 1 and writes the numbers to `numbers`: those of a contiguous f32 or
// f64 tensor, which must be `count`.
uint8_t tamp_arrival_poll(const tamp_arrival *arrival, double *numbers, size_t count, char **err) TAMP_NOEXCEPT;

// Starts to copy another tensor of the same dtype and shape into the same memory. Synchronizes if the last copy is not
// complete.
void tamp_arrival_again(tamp_arrival *arrival, const tamp_tensor *source, char **err) TAMP_NOEXCEPT;

// Waits until the copy is complete. Synchronizes.
void tamp_arrival_wait(const tamp_arrival *arrival, char **err) TAMP_NOEXCEPT;

// Returns the copy, which must not be read before it is complete.
tamp_tensor *tamp_arrival_copy(const tamp_arrival *arrival, char **err) TAMP_NOEXCEPT;

// Frees the copy, complete or not.
void tamp_arrival_free(tamp_arrival *arrival) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- autocast/autocast.cpp
// These functions read and change the autocast state of the calling thread, that of its regions.

enum { TAMP_AUTOCAST_DEVICES = 3 };

// The autocast state of one device type.
typedef struct tamp_autocast_device {
  int8_t device_type;
  int8_t dtype;
  uint8_t enabled;
} tamp_autocast_device;

// The autocast state of a thread: that of the first `count` elements of `devices`, whether casts of weights are cached,
// and the number of the overrides of autocast's lists, or 0.
typedef struct tamp_autocast_state {
  tamp_autocast_device devices[TAMP_AUTOCAST_DEVICES];
  uint8_t count;
  uint8_t cache_enabled;
  uint32_t overrides;
} tamp_autocast_state;

// Reads the state of the device types that `state` names.
void tamp_autocast_read(tamp_autocast_state *state, char **err) TAMP_NOEXCEPT;

// Opens a region by setting the state to `next`. Clears the weight cache if the region is the outermost one or changes
// a dtype. The caller first reads the state of the same devices, and closes the region with it.
void tamp_autocast_enter(const tamp_autocast_state *next, uint8_t outermost, char **err) TAMP_NOEXCEPT;

// Closes a region by setting the state to `previous`, which was read before the region was opened. Clears the weight
// cache under the same conditions. Cannot fail, because every value was read from the same devices.
void tamp_autocast_exit(const tamp_autocast_state *previous, uint8_t outermost) TAMP_NOEXCEPT;

// Clears the weight cache, which all threads share.
void tamp_autocast_clear_cache(char **err) TAMP_NOEXCEPT;

// Takes the calling thread out of its regions until tamp_regions_return, for a computation of this crate. Such pairs
// nest. Callbacks into the program, and functions that read or change the regions, are inside of them nevertheless.
void tamp_regions_leave(void) TAMP_NOEXCEPT;

// Ends the effect of one call of tamp_regions_leave.
void tamp_regions_return(void) TAMP_NOEXCEPT;

// Returns the number of the backward pass that runs on the calling thread, the innermost one of several, or -1 if none
// does.
int64_t tamp_autocast_backward(void) TAMP_NOEXCEPT;

// A callback, which neither throws nor unwinds.
typedef void (*tamp_autocast_settle)(void);

// Calls `settle` on the calling thread once the backward pass that runs there has ended, successfully or not, and
// libtorch has restored the state of the thread. `settle` is not called if there is no memory to register it, or if the
// backward pass ends on another thread.
void tamp_autocast_after_backward(tamp_autocast_settle settle) TAMP_NOEXCEPT;

// ---------------------------------------------------------------------------------------------- autocast/overrides.cpp
// What is wrong with a rule: its operator is unknown, all overloads of it write to their inputs, return views of them or
// take no tensors, or it cannot be composed.
enum { TAMP_OVERRIDE_OK = 0, TAMP_OVERRIDE_UNKNOWN = 1, TAMP_OVERRIDE_ALIASES = 2, TAMP_OVERRIDE_WHOLE = 3 };

// How an operator runs: in the dtype of the region, in f32, or composed of others in the dtype of the region.
enum { TAMP_RUN_HALF = 0, TAMP_RUN_F32 = 1, TAMP_RUN_COMPOSED = 2 };

// Overrides the overloads of an operator, whose name has its namespace, where its size is at least one number and below
// another; 2^64 - 1 is no limit. sizes.h says what a size is. What is composed keeps an intermediate result of at most
// `most_bytes`; where it would be larger, or the call cannot be composed, the rule does not apply.
typedef struct tamp_rule {
  const char *name;
  uint64_t at_least;
  uint64_t below;
  uint64_t most_bytes;
  uint8_t run_as;
} tamp_rule;

// Adds overrides of autocast's lists and returns their number, by which any thread can use them until the process ends.
// Of the rules of an operator, the last that applies counts. If one cannot be added, returns 0 and writes its place to
// `refused` and what is wrong to `problem`. Fails if another extension uses the same dispatch key.
uint32_t tamp_overrides_add(const tamp_rule *rules, size_t count, size_t *refused, uint8_t *problem,
                            char **err) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------- gradients/gradients.cpp
// These functions inspect, compute, move, add and convert the gradients of a list of parameters.

enum {
  TAMP_GRADIENT_REQUIRES_GRAD = 1,  // the parameter is not frozen
  TAMP_GRADIENT_STRIDED = 2,        // the gradient is dense
  TAMP_GRADIENT_SPARSE = 4,         // the gradient is in COO format
  TAMP_GRADIENT_OTHER_SHAPE = 8,    // the gradient has another shape or device than the parameter
  TAMP_GRADIENT_OTHER_DTYPE = 16,   // the gradient has another dtype than the parameter
  TAMP_GRADIENT_SHARED = 32,        // its memory may be used by another tensor, or twice by itself
};

// A description of one parameter and its gradient.
typedef struct tamp_gradient {
  uintptr_t parameter;  // identity of the parameter; zero if the tensor is undefined
  uintptr_t gradient;   // identity of the gradient; zero if there is none
  uintptr_t memory;     // identity of the memory that holds the gradient's numbers
  uint32_t version;     // the gradient's version, which libtorch increases with every change in place
  int8_t device_type;   // of the gradient, like the two below
  int8_t device_index;
  int8_t dtype;
  uint8_t flags;  // a sum of TAMP_GRADIENT_…
} tamp_gradient;

// Describes the gradients of `count` parameters, which may be undefined. With `hold` it takes a weak reference to the
// memory of each gradient, so that no other memory gets one of the identities in `memory` before
// tamp_gradients_release. On failure it holds nothing.
void tamp_gradients_inspect(tamp_tensor *const *parameters, size_t count, uint8_t hold, tamp_gradient *gradients,
                            char **err) TAMP_NOEXCEPT;

// Releases the references that one call of tamp_gradients_inspect with `hold` took.
void tamp_gradients_release(const tamp_gradient *gradients, size_t count) TAMP_NOEXCEPT;

// Gives gradients memory of their own, so that each can be changed in place alone: replaces those by copies that have
// memory in common with another gradient in the list or with themselves (expanded ones), and those whose memory an
// unknown tensor may use, unless something beside the parameter holds the gradient itself. A gradient that has its memory
// to itself stays the same tensor. On failure nothing is replaced.
void tamp_gradients_separate(tamp_tensor *const *parameters, size_t count, char **err) TAMP_NOEXCEPT;

// Does the same for the leaves of the graph of `loss`, to whose gradients a backward pass will add.
void tamp_gradients_separate_leaves(const tamp_tensor *loss, char **err) TAMP_NOEXCEPT;

// Writes the leaves to which the backward pass of `loss` adds gradients, except these `count` parameters, to `leaves`,
// an array of `room` nulls. Returns their number, which can exceed `room`. On failure, `leaves` holds those that were
// written.
size_t tamp_leaves(const tamp_tensor *loss, tamp_tensor *const *parameters, size_t count, tamp_tensor **leaves,
                   size_t room, char **err) TAMP_NOEXCEPT;

// Returns a number on the CPU that grows by one whenever a backward pass through the graph that exists now adds to the
// gradient of the leaf.
tamp_tensor *tamp_leaf_count_additions(const tamp_tensor *leaf, char **err) TAMP_NOEXCEPT;

// Removes the gradients of `count` parameters, so that no optimizer can apply them. Later ones have the dtypes of their
// parameters; without `narrows`, those of bf16 and fp16 parameters stay f32 if tamp_gradients_widen has made them so.
void tamp_gradients_drop(tamp_tensor *const *parameters, size_t count, uint8_t narrows, char **err) TAMP_NOEXCEPT;

// Moves the gradients of `count` parameters to `gradients`, which is an array of nulls before the call. A null stays
// where a parameter has no gradient. On failure, `gradients` holds those that were moved.
void tamp_gradients_take(tamp_tensor *const *parameters, size_t count, tamp_tensor **gradients,
                         char **err) TAMP_NOEXCEPT;

// Returns a flag on the device of a parameter's gradient: an f32 tensor of one element, which is zero if every element of
// the gradient is zero or if `before`, an earlier flag or null, is zero. Otherwise it is one.
tamp_tensor *tamp_gradient_rest(const tamp_tensor *parameter, const tamp_tensor *before, char **err) TAMP_NOEXCEPT;

// Runs the backward pass of `loss`, a tensor of one element, in the regions of the calling thread, as code of the
// program may run in it, and accumulates the gradients of its leaves. With `retain_graph` the graph can be used by
// another backward pass.
void tamp_backward(const tamp_tensor *loss, uint8_t retain_graph, char **err) TAMP_NOEXCEPT;

// Adds `gradients` to the gradients of `count` parameters, in place where the dtypes allow it. A parameter without a
// gradient gets the tensor itself. Separates the parameters' gradients first. On failure some have been added, and the
// tensors in `gradients` have not changed.
void tamp_gradients_add(tamp_tensor *const *parameters, tamp_tensor *const *gradients, size_t count,
                        char **err) TAMP_NOEXCEPT;

// Makes the gradients f32 of those of `count` parameters that are bf16 or fp16: converts existing gradients, and has
// autograd accumulate later ones in f32. Sets `widened`, which has `count` elements, to one for each parameter whose
// gradients were not f32 before, and otherwise to zero. Changes nothing on failure.
void tamp_gradients_widen(tamp_tensor *const *parameters, size_t count, uint8_t *widened, char **err) TAMP_NOEXCEPT;

// Undoes one call of tamp_gradients_widen, after which no number has changed: the gradients of `count` parameters have
// the dtypes of these again where `widened` is not zero. If `widened` is null, all of them have, and so have later ones
// after the parameters are converted. Changes nothing on failure.
void tamp_gradients_narrow(tamp_tensor *const *parameters, size_t count, const uint8_t *widened,
                           char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- gradients/storage.cpp
// These functions tell the shape of a tensor, which tensors share memory, and whether parameters were written to since
// their stamps were taken.

// Returns the number of dimensions of a tensor, and writes their sizes to `sizes` if there are at most `room`. Fails
// for a nested tensor.
size_t tamp_sizes(const tamp_tensor *tensor, int64_t *sizes, size_t room, char **err) TAMP_NOEXCEPT;

// Returns 1 if the tensor has a shape and memory with an element for each place of it, and 0 otherwise, as for a sparse
// or nested tensor and those of other libraries. A tensor that is expanded, conjugated or negated is dense.
uint8_t tamp_is_dense(const tamp_tensor *tensor, char **err) TAMP_NOEXCEPT;

// Returns 1 if two of `count` tensors have a byte of memory in common, and writes their places to `one` and `other`,
// which is the later one in memory. Returns 0 if all are apart.
uint8_t tamp_overlapping(tamp_tensor *const *tensors, size_t count, size_t *one, size_t *other,
                         char **err) TAMP_NOEXCEPT;

// What identifies the contents of a parameter. A stamp of zeros fits no parameter.
typedef struct tamp_stamp {
  uintptr_t memory;  // identity of the memory, with a weak reference to it, which has to be released
  uint64_t view;     // which elements of the memory belong to the parameter
  uint64_t version;  // the parameter's version, which libtorch increases with every change in place
} tamp_stamp;

// Writes to `changed` which of `count` parameters no longer fit their stamps.
void tamp_stamps_compare(tamp_tensor *const *parameters, size_t count, const tamp_stamp *stamps, uint8_t *changed,
                         char **err) TAMP_NOEXCEPT;

// Sets the stamps of `count` parameters to their present contents. Each stamp takes a weak reference to its memory.
void tamp_stamps_take(tamp_tensor *const *parameters, size_t count, tamp_stamp *stamps, char **err) TAMP_NOEXCEPT;

// Returns 1 if one of `count` parameters has other memory than when its stamp was taken, whatever was written to it.
uint8_t tamp_stamps_have_moved(tamp_tensor *const *parameters, size_t count, const tamp_stamp *stamps,
                               char **err) TAMP_NOEXCEPT;

// Releases the `memory` of a stamp that is no longer used. Does nothing if it is zero.
void tamp_memory_release(uintptr_t memory) TAMP_NOEXCEPT;

// Returns a weak reference to a defined tensor, which does not keep its memory. It has to be released by
// tamp_memory_release.
uintptr_t tamp_tensor_watch(const tamp_tensor *watched) TAMP_NOEXCEPT;

// Returns the tensor of a weak reference, or null if nothing else holds it any more.
tamp_tensor *tamp_tensor_watched(uintptr_t watch, char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- gradients/unscale.cpp
// These functions divide gradients by the loss scale, and check them for non-finite elements.

enum {
  TAMP_UNSCALE_RECHECK = 1,     // also find elements that only the multiplication made non-finite
  TAMP_UNSCALE_CHECK_ONLY = 2,  // only check, and change no gradient; without RECHECK the scale counts as one
  TAMP_UNSCALE_GENERIC = 4,     // use libtorch's generic operations instead of loops and AMP kernels
};

enum { TAMP_FINITE = 0, TAMP_NON_FINITE = 1, TAMP_ON_DEVICE = 2 };

// Multiplies the gradients of `count` parameters, all of them strided or COO, by 1/scale in place, and checks them. They
// are on `devices` devices.
//
// For each device, in the order of their first gradients, `found_infs` gets a new 0-dim f32 tensor: one if a gradient
// there has a non-finite element, and zero if not. The device's place in `answers` gets TAMP_FINITE or TAMP_NON_FINITE
// if the answer is in host memory, and otherwise TAMP_ON_DEVICE. `options` is a sum of TAMP_UNSCALE_….
//
// All memory is allocated on all devices before the first gradient changes. After a failure `begun` tells whether a
// gradient may have changed, and no tensor is returned. Synchronizes only if `scale` is on a GPU and gradients are on
// the CPU.
void tamp_gradients_unscale(tamp_tensor *const *parameters, size_t count, const tamp_tensor *scale,
                            tamp_tensor **found_infs, uint8_t *answers, size_t devices, uint8_t options, uint8_t *begun,
                            char **err) TAMP_NOEXCEPT;

// Returns the common norm of the gradients of `count` parameters, at least one, multiplied by 1/scale: a 0-dim tensor.
// The type of the norm is more than 0, and may be infinity. Null stands for a scale of one. The gradients are on one
// device, like the result, and do not change.
//
// The norm is f64 if all gradients are or if, on the CPU, it is finite but too large for f32. Otherwise it is f32.
// `found_inf` gets a new tensor: one if the norm is non-finite, which it is if a gradient is, and zero otherwise. `answer`
// means the same as in tamp_gradients_unscale. Synchronizes under the same condition.
tamp_tensor *tamp_gradients_norm(tamp_tensor *const *parameters, size_t count, double norm_type,
                                 const tamp_tensor *scale, tamp_tensor **found_inf, uint8_t *answer,
                                 char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------------- border/heap.cpp
// This function changes how the process allocates.

// Makes the C library keep freed memory in the process. Returns whether it can, which glibc can.
uint8_t tamp_heap_keep(void) TAMP_NOEXCEPT;

// -------------------------------------------------------------------------------------------------- border/scalars.cpp
// These functions make, write and read tensors of one number.

// Returns a 0-dim tensor that holds `value`. A `device_index` of -1 stands for a device type's current device.
tamp_tensor *tamp_number_new(double value, int8_t dtype, int8_t device_type, int8_t device_index,
                             char **err) TAMP_NOEXCEPT;

// Writes `value` to a tensor.
void tamp_number_set(tamp_tensor *number, double value, char **err) TAMP_NOEXCEPT;

// Lowers the number in a tensor to `most` if it is larger.
void tamp_number_limit(tamp_tensor *number, double most, char **err) TAMP_NOEXCEPT;

// Copies the elements of `count` real tensors of one device, one tensor after the other, to `values`, which has room
// for exactly these `len` elements. Synchronizes once.
void tamp_numbers_read(tamp_tensor *const *tensors, size_t count, double *values, size_t len, char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------------- scale/scale.cpp
// These functions update the loss scale of a scaler, and evaluate the flags that it depends on.

// Returns whether any of `count` one-element tensors is not zero. Synchronizes with their devices, in one transfer to
// the host.
uint8_t tamp_any_nonzero(tamp_tensor *const *tensors, size_t count, char **err) TAMP_NOEXCEPT;

// Returns a flag that is one if any of `count` flags is one, and zero if not. The flags are f32 tensors of one element,
// which is zero or one. The result is on the first GPU that one of them is on, or on the CPU if none is on a GPU. The
// result for a single flag is that flag itself.
tamp_tensor *tamp_flags_join(tamp_tensor *const *flags, size_t count, char **err) TAMP_NOEXCEPT;

// How an iteration changes the scale. The last three fields are used only if there is a tensor of tolerance counts.
typedef struct tamp_scale_rule {
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  double min_scale;
  double max_scale;
  int64_t hysteresis;   // the number of overflows after which the scale backs off
  double tolerance;     // the share of iterations with an overflow below which the scale does not back off
  uint8_t consecutive;  // restores the hysteresis after every iteration without overflow, not only after growth
} tamp_scale_rule;

// The elements of a tensor of tolerance counts: what is left of the hysteresis, and the numbers of iterations and of
// overflows since the scale last backed off or could grow.
enum { TAMP_TOLERANCE_HYSTERESIS = 0, TAMP_TOLERANCE_ITERATIONS = 1, TAMP_TOLERANCE_OVERFLOWS = 2 };

// A scale at the end of an iteration.
typedef struct tamp_scale_update {
  tamp_tensor *scale;              // f32
  tamp_tensor *tracker;            // i32, how many iterations without overflow count towards the next growth
  tamp_tensor *tolerance_counts;   // i64; null if the scale backs off at every overflow
  tamp_tensor *const *found_infs;  // `count` flags of the iteration, which may be on several devices
  size_t count;
  tamp_scale_rule rule;
} tamp_scale_update;

// Ends an iteration: grows each of `count` scales, backs it off or leaves it, and updates its tracker and its tolerance
// counts, all in place. All memory is allocated before the first scale changes. Never synchronizes with a device that a
// scale is on.
void tamp_scales_update(const tamp_scale_update *updates, size_t count, char **err) TAMP_NOEXCEPT;

// ------------------------------------------------------------------------------------------------ scale/loss_scale.cpp
// These functions multiply losses, and check gradients for functional loss scales.

// Multiplies a tensor by a factor of one element, which may be on another device. The product of half-precision numbers
// is f32. Its derivative is computed outside of all regions, too. Synchronizes only if the factor is on a GPU and the
// tensor on the CPU.
tamp_tensor *tamp_scaled(const tamp_tensor *tensor, const tamp_tensor *factor, char **err) TAMP_NOEXCEPT;

// Returns whether all elements of `count` floating-point or complex tensors are finite: a 0-dim bool tensor on the
// device of the first one. Synchronizes only if the first tensor is on the CPU and others are on a GPU.
tamp_tensor *tamp_all_finite(tamp_tensor *const *tensors, size_t count, char **err) TAMP_NOEXCEPT;

// ---------------------------------------------------------------------------------------- lean/linear_cross_entropy.cpp
// A loss that keeps fewer logits than a linear layer and cross_entropy.

enum { TAMP_LOSS_NONE = 0, TAMP_LOSS_MEAN = 1, TAMP_LOSS_SUM = 2 };

typedef struct tamp_cross_entropy {
  const tamp_tensor *class_weights;  // one for each class; may be null
  int64_t ignore_index;
  double label_smoothing;
  double soft_cap;     // 0 for none
  double z_loss;       // the factor of the squares of the logarithms of the sums
  uint64_t max_bytes;  // of the logits of a block; 0: all logits are kept
  uint8_t reduction;
} tamp_cross_entropy;

// Returns the place of the first target that is no class and not the ignored number, or -1. Targets that are not on the
// CPU are not looked at.
int64_t tamp_targets_check(const tamp_tensor *targets, int64_t classes, int64_t ignored, char **err) TAMP_NOEXCEPT;

// Returns the cross entropy of the outputs of a linear layer without a bias if that is null: f32, or f64 of f64 operands.
// The products have the dtype of the thread's region, or that of the operands. Never synchronizes.
tamp_tensor *tamp_linear_cross_entropy(const tamp_tensor *hidden, const tamp_tensor *weight, const tamp_tensor *bias,
                                       const tamp_tensor *targets, const tamp_cross_entropy *options,
                                       char **err) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------------- lean/linear_of.cpp
// Linear layers that keep what their inputs are computed from.

enum { TAMP_GELU = 0, TAMP_GELU_TANH = 1, TAMP_SILU = 2, TAMP_SWIGLU = 3 };

// A normalization over the last `dims` dimensions.
typedef struct tamp_norm {
  const int64_t *shape;       // of these dimensions
  const tamp_tensor *weight;  // in this shape; may be null
  const tamp_tensor *bias;    // the same; null for an RMSNorm
  double eps;
  size_t dims;
  uint8_t is_rms;
} tamp_norm;

// Returns a linear layer of an activation, without a bias if that is null, as the regions of the thread compute the two.
// TAMP_SWIGLU activates the first half of the last dimension and multiplies it by the second. Never synchronizes.
tamp_tensor *tamp_activation_linear(const tamp_tensor *xs, uint8_t activation, const tamp_tensor *weight,
                                    const tamp_tensor *bias, char **err) TAMP_NOEXCEPT;

// The same of a normalization.
tamp_tensor *tamp_norm_linear(const tamp_tensor *xs, const tamp_norm *norm, const tamp_tensor *weight,
                              const tamp_tensor *bias, char **err) TAMP_NOEXCEPT;

// -------------------------------------------------------------------------------------------------- gradients/clip.cpp
// These functions clip gradients.

// Multiplies the gradients of `count` parameters in place so that their common norm is at most `max_norm`. The type of
// the norm is more than 0, and may be infinity. Returns the norm before that, a 0-dim tensor on the device of the first
// gradient, or null if there are no gradients.
//
// With `error_if_nonfinite` it synchronizes, writes to `is_finite` whether the norm is finite, and changes nothing if
// it is not. Otherwise it synchronizes only if gradients are on the CPU and on other devices as well.
tamp_tensor *tamp_clip_grad_norm(tamp_tensor *const *parameters, size_t count, double max_norm, double norm_type,
                                 uint8_t error_if_nonfinite, uint8_t *is_finite, char **err) TAMP_NOEXCEPT;

// Returns the norm of norms of one type, at least one, each of which belongs to gradients on one device, on the first
// one's device. Synchronizes where they are on a GPU and on the CPU.
tamp_tensor *tamp_norms_join(tamp_tensor *const *norms, size_t count, double norm_type, char **err) TAMP_NOEXCEPT;

// Returns the factor, at most one, that reduces gradients whose norm this is to `max_norm`, on the norm's device.
tamp_tensor *tamp_clip_factor(const tamp_tensor *norm, double max_norm, char **err) TAMP_NOEXCEPT;

// Clips the gradients of `count` distinct parameters, whose total norm is `norm` and of which none shares memory.
void tamp_clip_by_norm(tamp_tensor *const *parameters, size_t count, const tamp_tensor *norm, double max_norm,
                       char **err) TAMP_NOEXCEPT;

// Clamps every element of the gradients of `count` parameters to [-max, max] in place.
void tamp_clip_grad_value(tamp_tensor *const *parameters, size_t count, double max, char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------------- optim/optim.cpp
// These functions take the steps of the fused optimizers, and convert and renew master weights.

enum {
  TAMP_OPTIM_ADAM = 0,
  TAMP_OPTIM_ADAMW = 1,
  TAMP_OPTIM_SGD = 2,
  TAMP_OPTIM_ADAGRAD = 3,
  TAMP_OPTIM_RMSPROP = 4,
  TAMP_OPTIM_LION = 5,
  TAMP_OPTIM_MUON = 6,
  TAMP_OPTIM_NADAM = 7,
  TAMP_OPTIM_ADAFACTOR = 8,
};

enum {
  TAMP_OPTIM_AMSGRAD = 1,
  TAMP_OPTIM_NESTEROV = 2,
  TAMP_OPTIM_MAXIMIZE = 4,
  TAMP_OPTIM_CENTERED = 8,
  TAMP_OPTIM_MATCH_RMS_ADAMW = 16,
  TAMP_OPTIM_DECOUPLED_WEIGHT_DECAY = 32,
};

// The largest number of states that an algorithm has for a parameter.
enum { TAMP_OPTIM_STATES = 3 };

// The options of a parameter group, by PyTorch's names. Each algorithm reads its own options only.
typedef struct tamp_optim_options {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double momentum;
  double dampening;
  double lr_decay;
  double alpha;
  double ns_a;  // the three ns_coefficients
  double ns_b;
  double ns_c;
  double momentum_decay;
  double beta2_decay;
  double eps2;            // `eps` of Adafactor is its first one, or NaN for that of the dtype
  double clip_threshold;  // `d` of Adafactor
  uint8_t algorithm;      // TAMP_OPTIM_ADAM to TAMP_OPTIM_ADAFACTOR
  uint8_t flags;          // a sum of TAMP_OPTIM_AMSGRAD to TAMP_OPTIM_DECOUPLED_WEIGHT_DECAY
  uint8_t ns_steps;
  // Two f32 on the device of the parameters, or null: `lr` and 1 - lr * weight_decay, which steps there read instead.
  tamp_tensor *rates;
} tamp_optim_options;

// What a parameter is updated from. Every kind of master weights computes the update in f32.
enum {
  TAMP_MASTER_NONE = 0,        // from the parameter itself; its state has its dtype
  TAMP_MASTER_FLOAT = 1,       // from an f32 copy
  TAMP_MASTER_REMAINDER = 2,   // from the bf16 parameter and the 16 bits that complete it to an f32
  TAMP_MASTER_STOCHASTIC = 3,  // from the bf16 parameter; the result is rounded stochastically
};

// How the states of a parameter are kept. Where the arithmetic is f32, Adam and AdamW can keep low-bit moments, and
// Muon a bf16 momentum_buffer. Such moments are contiguous, and `step` is an i64.
enum {
  TAMP_STATES_PLAIN = 0,      // in the dtype of the arithmetic
  TAMP_STATES_BFLOAT16 = 1,   // rounded by a dither
  TAMP_STATES_EIGHT_BIT = 2,  // exp_avg as i8, exp_avg_sq as u8, and for each 32 of them an exponent, a u8
};

// A parameter and its state. The states have its shape, dtype and device; with master weights they are f32, and the
// gradient has the parameter's dtype or is f32.
typedef struct tamp_optim_parameter {
  tamp_tensor *parameter;
  // The number of steps, one element: an f32, or an i64 with low-bit moments; null for SGD, Lion and Muon with neither
  // these nor stochastic rounding.
  tamp_tensor *step;
  // For Adam and AdamW exp_avg, exp_avg_sq and, with AMSGrad, max_exp_avg_sq; for SGD with momentum and for Muon the
  // momentum_buffer; for Adagrad the sum; for RMSprop square_avg, with momentum the momentum_buffer and, if it is
  // centered, grad_avg; for Lion exp_avg. The others are null. The third of TAMP_STATES_EIGHT_BIT are the exponents.
  tamp_tensor *states[TAMP_OPTIM_STATES];
  tamp_tensor *master;  // the f32 copy, or the remainder as i16; null for the other kinds
  tamp_stamp *stamp;    // of the parameter when it last agreed with `master`; not used without one
  uint64_t seed;        // for stochastic rounding; the random numbers depend on `step` as well
  uint32_t options;     // an index into the array of options
  uint8_t masters;      // TAMP_MASTER_…
  uint8_t first_step;   // initializes the momentum buffer with the gradient
  uint8_t complete;     // whether all of the state exists that the options require
  uint8_t many_steps;   // whether there may be 2^24 steps or more, of which f32 does not have every number
  uint8_t kept_as;      // TAMP_STATES_…
  uint8_t elsewhere;    // whether another rank steps it, so that it is left out here
} tamp_optim_parameter;

// How the gradients are unscaled before the update, and whether there is one. Each tensor may be null.
typedef struct tamp_optim_scale {
  tamp_tensor *grad_scale;  // the gradients are divided by this or, with `clip`, multiplied by its reciprocal
  tamp_tensor *clip;        // the gradients are multiplied by this
  tamp_tensor *found_inf;   // the step is skipped if this is not zero
} tamp_optim_scale;

// What a step does with a parameter, or why the whole step cannot be taken.
enum {
  TAMP_STEP_TAKEN = 0,
  TAMP_STEP_LEFT_OUT = 1,    // the parameter has no gradient, is frozen, or is stepped elsewhere
  TAMP_STEP_REFUSED = 2,     // no step can take such a gradient, or a parameter in the memory of another
  TAMP_STEP_STALE = 3,       // the parameter does not fit its stamp: its master has to be renewed first
  TAMP_STEP_INCOMPLETE = 4,  // some of the parameter's state has to be made first
};

// Steps those of `count` parameters that have gradients, each with the options that it names, and takes new stamps of
// those with masters.
//
// Writes TAMP_STEP_… to `answers` for each parameter. Changes nothing if one of them is neither TAMP_STEP_TAKEN nor
// TAMP_STEP_LEFT_OUT. Checks all parameters and allocates all memory before it changes any of them. On the CPU the
// gradients do not change; libtorch's kernels for other devices unscale them in place. Synchronizes only if a tensor of
// `scale` is on a GPU and parameters are on the CPU.
void tamp_optim_step(const tamp_optim_parameter *parameters, size_t count, const tamp_optim_options *options,
                     const tamp_optim_scale *scale, uint8_t *answers, char **err) TAMP_NOEXCEPT;

// Returns the f32 numbers that a bf16 parameter and its remainder stand for.
tamp_tensor *tamp_master_join(const tamp_tensor *parameter, const tamp_tensor *remainder, char **err) TAMP_NOEXCEPT;

// Returns the remainders of f32 numbers: for each number in `master` that rounds to the bf16 number in `parameter`,
// with ties away from zero, the 16 bits that complete the latter, and zero for all others.
tamp_tensor *tamp_master_remainder_of(const tamp_tensor *master, const tamp_tensor *parameter,
                                      char **err) TAMP_NOEXCEPT;

// Returns the numbers of a master, an f32 copy or a remainder, where they round to the numbers of a parameter in bf16 or
// fp16, and elsewhere those of the parameter, which may have any floating-point dtype. The result is f32, or f64 if the
// parameter is.
tamp_tensor *tamp_master_numbers(const tamp_tensor *master, const tamp_tensor *parameter, char **err) TAMP_NOEXCEPT;

// Renews `count` masters, f32 copies or remainders, after other code has written to their parameters. An f32 number
// that still rounds to its parameter is kept and any other becomes the parameter's; a remainder becomes zero. Changes
// nothing if it runs out of memory.
void tamp_masters_renew(tamp_tensor *const *parameters, tamp_tensor *const *masters, size_t count,
                        char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------------- optim/state.cpp
// These functions make the state of the fused optimizers.

// The shape of a state: that of its parameter and its strides, the same contiguous, or one element for each 32.
enum {
  TAMP_STATE_LIKE = 0,
  TAMP_STATE_CONTIGUOUS = 1,
  TAMP_STATE_OF_BLOCKS = 2,
  TAMP_STATE_OF_ROWS = 3,
  TAMP_STATE_OF_COLUMNS = 4,
  TAMP_STATE_OF_ONE = 5,
};

// Makes a tensor for each of `count` parameters, filled with `value` and outside of autograd. Its dtype is `dtype`, or
// the parameter's if that is -1, and `shape` is TAMP_STATE_…. The tensors of one dtype are parts of one buffer on the
// CPU, and of a few on other devices. On failure it makes none.
void tamp_optim_states_new(tamp_tensor *const *parameters, size_t count, int8_t dtype, uint8_t shape, double value,
                           tamp_tensor **states, char **err) TAMP_NOEXCEPT;

// Makes an f32 copy of each of `count` parameters. The copies are parts of buffers as well. On failure it makes none.
void tamp_masters_new(tamp_tensor *const *parameters, size_t count, tamp_tensor **masters, char **err) TAMP_NOEXCEPT;

// ------------------------------------------------------------------------------------------------- optim/eight_bit.cpp
// These functions convert moments between f32 and TAMP_STATES_EIGHT_BIT, whose three tensors are `codes`.

// Returns the f32 numbers of 8-bit moments: exp_avg and exp_avg_sq, in the shape of the first.
void tamp_codes_decode(const tamp_tensor *exp_avg, const tamp_tensor *exp_avg_sq, const tamp_tensor *exponents,
                       tamp_tensor **numbers, char **err) TAMP_NOEXCEPT;

// Overwrites the three tensors `codes` with the encoding of f32 moments, rounded to nearest. First moments larger than a
// step with these betas can store are cut off.
void tamp_codes_encode(const tamp_tensor *exp_avg, const tamp_tensor *exp_avg_sq, double beta1, double beta2,
                       tamp_tensor *const *codes, char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- function/function.cpp
// These functions put custom functions, whose backward pass is a callback, into the graph of autograd, and compute the
// gradients of chosen tensors.

// The node of a custom function in autograd's graph.
typedef struct tamp_node tamp_node;

// The backward pass of a function. `grad_outputs` borrows a tensor for each output, or null for a missing gradient. The
// callback writes a tensor for each input to `grad_inputs`, or null for none, and gives them away.
//
// On failure it writes a message from tamp_string_new, without the function's name, to `err`, and no tensor. Like the
// other callbacks it neither throws nor unwinds. No two callbacks of one state run at the same time.
typedef void (*tamp_function_backward)(void *state, const tamp_node *node, tamp_tensor *const *grad_outputs,
                                       size_t outputs, tamp_tensor **grad_inputs, size_t inputs, char **err);

// Removes from a state the values that forward saved, and returns them for `free_saved`, or null if there are none. It
// must not run user code, because a lock is held.
typedef void *(*tamp_function_take)(void *state);

// Frees a state, or the values that were removed from one. It may be called on any thread and run any user code.
typedef void (*tamp_function_free)(void *what);

enum {
  TAMP_FUNCTION_MATERIALIZE_GRADS = 1,    // backward gets zeros for the missing gradient of an output
  TAMP_FUNCTION_ONCE_DIFFERENTIABLE = 2,  // the gradients that backward returns cannot be differentiated
  TAMP_FUNCTION_SAVES_VALUES = 4,         // the state holds values that `take_saved` removes
};

// A function value and its callbacks.
typedef struct tamp_function {
  void *state;
  tamp_function_backward backward;
  tamp_function_take take_saved;  // called when backward has run and will not run again
  tamp_function_free free_saved;
  tamp_function_free drop;  // frees the state
  const char *name;         // for messages: `name_length` bytes, which are copied
  size_t name_length;
  uint8_t flags;
} tamp_function;

// What has to be known of an input before forward runs.
typedef struct tamp_function_input {
  size_t uses;            // the number of handles of the tensor
  uint8_t requires_grad;  // zero if gradients are disabled
} tamp_function_input;

typedef struct tamp_tensors {
  tamp_tensor *const *tensors;
  size_t count;
} tamp_tensors;

// A finished call of forward: its inputs and what it told its context.
typedef struct tamp_function_call {
  tamp_tensors inputs;               // may be undefined
  const tamp_function_input *infos;  // one for each input, from tamp_function_begin
  tamp_tensors saved;                // may be undefined
  tamp_tensors dirty;
  tamp_tensors non_differentiable;
  uint8_t recorded;  // the answer of tamp_function_begin
} tamp_function_call;

// Describes the `count` inputs, which may be undefined. Returns whether autograd will record the call.
uint8_t tamp_function_begin(tamp_tensor *const *inputs, size_t count, tamp_function_input *infos,
                            char **err) TAMP_NOEXCEPT;

// Makes the `count` outputs of forward the outputs of an autograd operation, in place. Always takes ownership of the
// state, and drops it at once if the call is not recorded. On failure the outputs do not change.
void tamp_function_record(const tamp_function *function, const tamp_function_call *call, tamp_tensor *const *outputs,
                          size_t count, char **err) TAMP_NOEXCEPT;

// Returns the first `count` tensors that forward saved, undefined ones included. To be called during backward only.
void tamp_function_saved_tensors(const tamp_node *node, tamp_tensor **saved, size_t count, char **err) TAMP_NOEXCEPT;

// Returns whether the gradient of an input is needed. To be called during backward only.
uint8_t tamp_function_needs_input_grad(const tamp_node *node, size_t input, char **err) TAMP_NOEXCEPT;

// What keeps tamp_grad from computing gradients.
enum {
  TAMP_GRAD_POSSIBLE = 0,
  TAMP_GRAD_OUTPUT_UNDEFINED = 1,
  TAMP_GRAD_OUTPUT_WITHOUT_GRAPH = 2,  // it does not require a gradient
  TAMP_GRAD_OUTPUT_NOT_SCALAR = 3,     // it has no gradient in `grad_outputs`, and not one element
  TAMP_GRAD_OUTPUT_NOT_REAL = 4,       // it has no gradient in `grad_outputs`, and is complex
  TAMP_GRAD_GIVEN_UNDEFINED = 5,       // the gradient in `grad_outputs` is an undefined tensor
  TAMP_GRAD_GIVEN_SHAPE = 6,           // it has another shape than the output
  TAMP_GRAD_GIVEN_DTYPE = 7,           // it is real and the output complex, or the other way round
  TAMP_GRAD_INPUT_UNDEFINED = 8,
  TAMP_GRAD_INPUT_WITHOUT_GRAD = 9,  // it does not require a gradient
  TAMP_GRAD_INPUT_UNUSED = 10,       // the outputs do not depend on it
};

// The gradients that are wanted: those of the outputs, at least one, with respect to the inputs, at least one.
typedef struct tamp_grad_call {
  tamp_tensors outputs;
  tamp_tensors grad_outputs;  // one for each output, or null for a one
  tamp_tensors inputs;
  uint8_t retain_graph;
  uint8_t create_graph;
  uint8_t allow_unused;
} tamp_grad_call;

// Computes the gradients of the outputs with respect to the inputs, in the regions of the calling thread, as code of
// the program may run in it, and accumulates none. Writes a tensor for each input to `gradients`, or null for an unused
// one.
//
// If it returns another number than TAMP_GRAD_POSSIBLE, it has written no tensor, and the place of the tensor with the
// problem to `place`. An unused input is found before anything is computed, unless a node below the outputs leads to it
// and returns no gradient.
uint8_t tamp_grad(const tamp_grad_call *call, tamp_tensor **gradients, size_t *place, char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- border/checkpoint.cpp
// These functions read and write what checkpoints contain: the bytes of tensors, and the states of random number
// generators.

// Copies `len` bytes of the elements of a contiguous tensor to host memory, beginning with element `first`.
// Synchronizes.
void tamp_elements_read(const tamp_tensor *from, int64_t first, uint8_t *to, size_t len, char **err) TAMP_NOEXCEPT;

// Overwrites the elements of a contiguous tensor with `len` bytes, beginning with element `first`. Synchronizes.
void tamp_elements_write(tamp_tensor *to, int64_t first, const uint8_t *from, size_t len, char **err) TAMP_NOEXCEPT;

// Returns the state of a device's default random number generator, a one-dimensional uint8 tensor. May synchronize.
tamp_tensor *tamp_rng_state(int8_t device_type, int8_t index, char **err) TAMP_NOEXCEPT;

// Sets the state of a device's default random number generator. Fails, and changes nothing, if `state` is not a state
// of such a generator.
void tamp_rng_set_state(int8_t device_type, int8_t index, const tamp_tensor *state, char **err) TAMP_NOEXCEPT;

// Fails unless `state` is a state of such a generator. The generator itself, which other threads may be using, stays
// alone: a copy of it takes the state.
void tamp_rng_check_state(int8_t device_type, int8_t index, const tamp_tensor *state, char **err) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------------- optim/average.cpp
// These functions update averages of weights.

// Kinds of averages.
enum { TAMP_AVERAGE_EMA = 0, TAMP_AVERAGE_SWA = 1 };

// The options of an average, by their names in src/average.
typedef struct tamp_average_options {
  double decay;
  uint8_t kind;
  uint8_t warmup;
  uint8_t debias;
} tamp_average_options;

// Counts an update on a device, unless `skips`, a number there, is not zero. The count is an f64 tensor of three
// numbers: the updates so far, what is left of the weight that the start would have without the correction of its
// bias, and the weight of the last update, which is zero if that was skipped. Returns the new count, on the device of
// `skips`. Without `count`, its first two numbers are given; without `skips`, the update takes place. Does not
// synchronize.
tamp_tensor *tamp_average_count(const tamp_tensor *count, double updates, double rest, const tamp_tensor *skips,
                                const tamp_average_options *options, char **err) TAMP_NOEXCEPT;

// Moves `count` averages towards parameters: average + weight * (parameter - average). An average is f32 for a
// parameter of at most 32 bits, and f64 for one in f64; the parameter is converted exactly. A weight of zero changes
// nothing, and a weight of one copies. With `counted`, a count of the previous function, its weight is used instead of
// `weight`; it does not synchronize unless some parameter is on the CPU. On failure nothing has changed, except by a
// lack of memory of a device.
void tamp_average_update(tamp_tensor *const *averages, tamp_tensor *const *parameters, size_t count, double weight,
                         const tamp_tensor *counted, char **err) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------- autocast/statistics.cpp
// These functions average the running statistics of batch normalization over the calls of each layer.

typedef struct tamp_statistics tamp_statistics;

// What tamp_statistics_calls returns of a statistic that no call had, and of one that instance normalization has moved
// on from the model's own numbers.
enum { TAMP_STATISTICS_NEVER_MET = -1, TAMP_STATISTICS_KEPT = -2 };

// Begins a pass on the calling thread. `running` are the `count` statistics that its layers write to, each with memory
// of its own; `own` has the model's numbers, and `variances` says which of them are variances. At the first call that
// has it, a statistic becomes 0, or 1 if it is a variance; each call in training makes it the mean of all of them.
// Passes end in the reverse order of their beginning, on the same thread.
tamp_statistics *tamp_statistics_begin(tamp_tensor *const *running, tamp_tensor *const *own, const uint8_t *variances,
                                       size_t count, char **err) TAMP_NOEXCEPT;

// Returns how many calls in training a statistic has had; see above for those below 0.
int64_t tamp_statistics_calls(const tamp_statistics *pass, size_t index) TAMP_NOEXCEPT;

// Ends a pass and frees it.
void tamp_statistics_end(tamp_statistics *pass) TAMP_NOEXCEPT;

// Counts a call of a layer that does not use libtorch's batch normalization, and returns the momentum that it is to
// have: `momentum` unless a pass has these statistics. They must not be read or written before it.
double tamp_statistics_momentum(const tamp_tensor *mean, const tamp_tensor *variance, uint8_t trains, double momentum,
                                char **err) TAMP_NOEXCEPT;

// ---------------------------------------------------------------------------------------------------- scale/spikes.cpp
// These functions decide on the device whether a step is skipped because a number is far above its history.

// The options, by their names in src/scaler/spikes.rs.
typedef struct tamp_spike_options {
  double deviations;
  int64_t window;
  int64_t warmup;
  int64_t max_in_a_row;
} tamp_spike_options;

// The places in a history, an f64 tensor on any device: the numbers taken so far, the spikes in a row, all spikes, the
// numbers that were not finite, whether the last step is skipped, and the first number of the window.
enum {
  TAMP_SPIKES_TAKEN = 0,
  TAMP_SPIKES_IN_A_ROW = 1,
  TAMP_SPIKES_FOUND = 2,
  TAMP_SPIKES_NON_FINITE = 3,
  TAMP_SPIKES_SKIPPED = 4,
  TAMP_SPIKES_WINDOW = 5,
};

// Judges the next number of a history. Without a history, one begins. Returns the new history, on the device of `value`,
// which has one element. The step is skipped if the number is a spike or not finite, or if the history `other` has
// skipped it already, which is not counted again. A number of a skipped step does not enter the window. Does not
// synchronize.
tamp_tensor *tamp_spikes_judge(const tamp_tensor *history, const tamp_tensor *value, const tamp_tensor *other,
                               const tamp_spike_options *options, char **err) TAMP_NOEXCEPT;

// Returns the flag of a history's last step: an f32 that is 1 if the step is skipped, and otherwise 0.
tamp_tensor *tamp_spikes_flag(const tamp_tensor *history, char **err) TAMP_NOEXCEPT;

// -------------------------------------------------------------------------------------------- border/device_memory.cpp
// These functions read and reset what libtorch's allocator of a device counts.

// Bytes: in tensors and taken from the device, now and at most since the peaks were reset.
typedef struct tamp_device_memory {
  int64_t allocated;
  int64_t max_allocated;
  int64_t reserved;
  int64_t max_reserved;
} tamp_device_memory;

// Reads the counters of a device. Fails for the CPU, and for a device whose allocator does not count. Does not
// synchronize.
void tamp_device_memory_read(int8_t device_type, int8_t index, tamp_device_memory *out, char **err) TAMP_NOEXCEPT;

// Resets the peaks of a device to what it uses now.
void tamp_device_memory_reset(int8_t device_type, int8_t index, char **err) TAMP_NOEXCEPT;

// The CPU memory that libtorch allocates on a thread, and frees again.
typedef struct tamp_allocations tamp_allocations;

// Counts what this thread allocates from now on, and what the backward passes that it starts do. Counts may be nested:
// the inner one hides its allocations from the outer one. Fails while a profiler of libtorch runs on this thread.
tamp_allocations *tamp_allocations_count(char **err) TAMP_NOEXCEPT;

// Ends the count that began last on this thread, frees it and returns the most bytes that it had at any time.
uint64_t tamp_allocations_end(tamp_allocations *count) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------- saved_tensors/engine.cpp
// These functions set the form in which tensors are kept that autograd saves for a backward pass. libtorch asks its
// engine for that form, so the engine of the process is replaced once by one that runs backward passes like libtorch's.

enum {
  TAMP_SAVED_AS_GIVEN = 0,
  TAMP_SAVED_HALF = 1,
  TAMP_SAVED_FP8_ROWS = 2,
  TAMP_SAVED_ON_HOST = 3,
};

// Makes autograd ask this crate, unless it does already. Returns null if that succeeds. If another engine than
// libtorch's own is in place, nothing changes, and its type is returned; free it with tamp_string_free.
char *tamp_saved_tensors_prepare(char **err) TAMP_NOEXCEPT;

// A way in which saved tensors are kept.
typedef struct tamp_saved_tensors tamp_saved_tensors;

// Returns a new one, of TAMP_SAVED_….
tamp_saved_tensors *tamp_saved_tensors_new(uint8_t how, char **err) TAMP_NOEXCEPT;

// Returns that of the innermost region of the calling thread, or null if there is none.
tamp_saved_tensors *tamp_saved_tensors_current(char **err) TAMP_NOEXCEPT;

// Frees it. What was saved with it stays as it is kept.
void tamp_saved_tensors_free(tamp_saved_tensors *saved) TAMP_NOEXCEPT;

// Whether every bit of a tensor is kept.
uint8_t tamp_saved_tensors_is_exact(const tamp_saved_tensors *saved) TAMP_NOEXCEPT;

// The part of a thread's run in which tensors are kept in such a way.
typedef struct tamp_saved_tensors_region tamp_saved_tensors_region;

// Opens a region on the calling thread. With null, autograd keeps the tensors themselves in it.
tamp_saved_tensors_region *tamp_saved_tensors_enter(const tamp_saved_tensors *saved, char **err) TAMP_NOEXCEPT;

// Closes the region of the calling thread that was opened last.
void tamp_saved_tensors_leave(tamp_saved_tensors_region *region) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------- saved_tensors/recomputed.cpp
// Runs a part of a model again on `count` inputs, which may be undefined, while autograd keeps what it saves in the way
// `how`. Writes a message to `err` if it fails, as the functions of the shim do.
typedef void (*tamp_run_again)(void *state, tamp_tensor *const *inputs, size_t count, const tamp_saved_tensors *how,
                               char **err);

// Returns a way for the first run of a part of a model. Nothing is kept but the inputs, and the first backward pass that
// asks for a saved tensor runs the part again. Always takes ownership of the state. Returns null if gradients are off.
tamp_saved_tensors *tamp_saved_tensors_recomputed(tamp_tensor *const *inputs, size_t count, void *state,
                                                  tamp_run_again run, tamp_function_free drop,
                                                  char **err) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------------------- jit/jit.cpp
// These functions are for TorchScript modules, which tch runs. They exist with the feature `jit` only.

// Turns TorchScript's own autocast pass on or off, in all threads. Returns whether it was on.
uint8_t tamp_jit_set_autocast_mode(uint8_t enabled, char **err) TAMP_NOEXCEPT;

// Freezes the module in a TorchScript file of `count` bytes. Returns the bytes of the file of the frozen module, as a
// uint8 tensor.
tamp_tensor *tamp_jit_freeze(const uint8_t *file, size_t count, char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------------- graph/graph.cpp
// These functions capture what a thread does on a CUDA device, and replay it. They exist with the feature `graph` only.

// A graph of CUDA with the stream on which it is captured.
typedef struct tamp_graph tamp_graph;

// Makes an empty graph for a CUDA device. Fails if there are no graphs.
tamp_graph *tamp_graph_new(int8_t index, char **err) TAMP_NOEXCEPT;

void tamp_graph_free(tamp_graph *graph) TAMP_NOEXCEPT;

// Makes the graph's stream the thread's current one of the device, after what the thread has given to the stream before.
void tamp_graph_enter(tamp_graph *graph, char **err) TAMP_NOEXCEPT;

// Makes the stream before `enter` the current one again, after what was given to the graph's. Does nothing without one.
void tamp_graph_leave(tamp_graph *graph, char **err) TAMP_NOEXCEPT;

// Begins a capture on the graph's stream, which is the current one. Synchronizes with the device.
void tamp_graph_begin(tamp_graph *graph, char **err) TAMP_NOEXCEPT;

// Ends a capture, also one that has failed.
void tamp_graph_end(tamp_graph *graph, char **err) TAMP_NOEXCEPT;

// Launches the captured graph on the current stream. Does not synchronize.
void tamp_graph_replay(tamp_graph *graph, char **err) TAMP_NOEXCEPT;

// Copies `count` numbers to an f32 tensor of as many elements, for the launches that follow. Does not synchronize.
void tamp_graph_write(tamp_tensor *to, const float *numbers, size_t count, char **err) TAMP_NOEXCEPT;

// -------------------------------------------------------------------------------------------------- border/testing.cpp
// These functions serve the crate's own tests, and exist in debug builds only.
#ifdef TAMP_WITH_TESTING

enum { TAMP_TESTING_TORCH_ERROR = 0, TAMP_TESTING_BAD_ALLOC = 1, TAMP_TESTING_INT = 2 };

// Makes the calling thread's `call`-th call from now on of a function that can fail throw an exception of the given
// kind. Zero cancels this. Returns what was left of the previous countdown, which is zero if that call has failed.
int64_t tamp_testing_fail_at(int64_t call, uint8_t kind) TAMP_NOEXCEPT;

enum { TAMP_TESTING_OVERFLOW = 0, TAMP_TESTING_FREED = 1, TAMP_TESTING_UNDEFINED = 2, TAMP_TESTING_LEAK = 3 };

// Commits a fault that a sanitizer has to find: writes past the end of memory or to freed memory, overflows an integer,
// or leaks memory.
void tamp_testing_fault(uint8_t kind) TAMP_NOEXCEPT;

// Makes the optimizers of the calling thread treat the CPU like other devices.
void tamp_testing_as_other_device(uint8_t enabled) TAMP_NOEXCEPT;

enum { TAMP_TESTING_ENGINE_OF_LIBTORCH = 0, TAMP_TESTING_ENGINE_OF_OTHERS = 1 };

// Makes libtorch's own engine run the backward passes of the process, or one that is neither libtorch's nor this crate's.
void tamp_testing_engine(uint8_t kind) TAMP_NOEXCEPT;

// Enters or leaves libtorch's inference mode on the calling thread.
void tamp_testing_inference_mode(uint8_t enabled) TAMP_NOEXCEPT;

#endif

#ifdef __cplusplus
}
#endif
