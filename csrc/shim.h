// The whole C ABI of tch-amp. src/sys.rs mirrors it declaration by declaration; tests/abi.rs compares the two.
//
// The contract, once for all functions:
// - Nothing throws: every function is noexcept.
// - A function that can fail takes `char **err` last. On failure it writes a malloc'd message there, which the caller
//   frees with tamp_string_free, and returns zero or null; on success it leaves *err alone.
// - Tensors are borrowed. A tensor that a function returns belongs to the caller.
// - Booleans are uint8_t, zero or one. Device types are c10::DeviceType and dtypes c10::ScalarType, both as int8_t.
// - C types only.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TAMP_NOEXCEPT noexcept
extern "C" {
#else
#define TAMP_NOEXCEPT
#endif

// An at::Tensor. The pointers are the ones that tch hands out.
typedef struct tamp_tensor tamp_tensor;

// Frees a message that a function wrote to `err`. Null is allowed.
void tamp_string_free(char *text) TAMP_NOEXCEPT;

// A copy of `text` for a callback to write to its `err`.
char *tamp_string_new(const char *text) TAMP_NOEXCEPT;

// ---------------------------------------------------------------------------------------------------------- device.cpp

// Whether this libtorch has its CUDA library linked in.
uint8_t tamp_cuda_is_linked(void) TAMP_NOEXCEPT;

// Initialises CUDA, which fails with libtorch's own reason where it cannot be used.
void tamp_cuda_initialize(char **err) TAMP_NOEXCEPT;

// A number on its way from a device to the host.
typedef struct tamp_arrival tamp_arrival;

enum { TAMP_PENDING = 0, TAMP_ZERO = 1, TAMP_NONZERO = 2 };

// Sends `flag`, an f32 of one element on a GPU, to the host without waiting for it.
tamp_arrival *tamp_arrival_new(const tamp_tensor *flag, char **err) TAMP_NOEXCEPT;

// Whether it is there and zero. Never waits.
uint8_t tamp_arrival_poll(const tamp_arrival *arrival, char **err) TAMP_NOEXCEPT;

void tamp_arrival_free(tamp_arrival *arrival) TAMP_NOEXCEPT;

// -------------------------------------------------------------------------------------------------------- autocast.cpp

enum { TAMP_AUTOCAST_DEVICES = 3 };

// The autocast state of one device type on the calling thread.
typedef struct tamp_autocast_device {
  int8_t device_type;
  int8_t dtype;
  uint8_t enabled;
} tamp_autocast_device;

// The autocast state of the first `count` device types and the thread's cache flag.
typedef struct tamp_autocast_state {
  tamp_autocast_device devices[TAMP_AUTOCAST_DEVICES];
  uint8_t count;
  uint8_t cache_enabled;
} tamp_autocast_state;

// Reads the state of the device types that `state` names.
void tamp_autocast_read(tamp_autocast_state *state, char **err) TAMP_NOEXCEPT;

// Opens a region: sets `next`. Clears the weight cache when the region is the outermost or changes a dtype. What was
// read of the same devices before is what closes it.
void tamp_autocast_enter(const tamp_autocast_state *next, uint8_t outermost, char **err) TAMP_NOEXCEPT;

// Closes a region: sets `previous`, the state from before it. Clears the cache as on entry. It cannot fail, because
// every value was read from the same devices.
void tamp_autocast_exit(const tamp_autocast_state *previous, uint8_t outermost) TAMP_NOEXCEPT;

// Forgets every cached cast of a weight, in all threads.
void tamp_autocast_clear_cache(char **err) TAMP_NOEXCEPT;

// The number of the backward that runs on the calling thread, the innermost of several; -1 where none does.
int64_t tamp_autocast_backward(void) TAMP_NOEXCEPT;

// Like the other callbacks it neither throws nor unwinds.
typedef void (*tamp_autocast_settle)(void);

// Has `settle` called on the calling thread when the backward that runs there has ended, whether or not it failed, and
// libtorch has restored the state of the thread. Without memory for that, or where another thread ends the backward,
// `settle` is not called.
void tamp_autocast_after_backward(tamp_autocast_settle settle) TAMP_NOEXCEPT;

// ------------------------------------------------------------------------------------------------------- gradients.cpp

enum {
  TAMP_GRADIENT_REQUIRES_GRAD = 1,  // the parameter takes part in training
  TAMP_GRADIENT_STRIDED = 2,        // dense memory with strides
  TAMP_GRADIENT_SPARSE = 4,         // COO
  TAMP_GRADIENT_OVERLAPS = 8,       // some of its elements share memory
  TAMP_GRADIENT_OTHER_SHAPE = 16,   // not the parameter's shape and device
  TAMP_GRADIENT_OTHER_DTYPE = 32,   // not the parameter's dtype
};

// What is known of one parameter and its gradient.
typedef struct tamp_gradient {
  uintptr_t parameter;  // identity of the parameter; zero when the tensor is undefined
  uintptr_t gradient;   // identity of the gradient; zero when there is none
  uintptr_t memory;     // identity of what holds its numbers
  uint32_t version;     // of the gradient, raised by libtorch at every in-place change
  int8_t device_type;   // of the gradient, like the two below
  int8_t device_index;
  int8_t dtype;
  uint8_t flags;
} tamp_gradient;

// Describes the gradients of `count` parameters. With `hold` it holds the memory of each weakly, and until
// tamp_gradients_release none of the numbers in `memory` is given to other memory. On failure none is held.
void tamp_gradients_inspect(tamp_tensor *const *parameters, size_t count, uint8_t hold, tamp_gradient *gradients,
                            char **err) TAMP_NOEXCEPT;

// Releases what tamp_gradients_inspect has held, once for each time.
void tamp_gradients_release(const tamp_gradient *gradients, size_t count) TAMP_NOEXCEPT;

// Drops the gradients of `count` parameters, so that no optimizer can apply them.
void tamp_gradients_drop(tamp_tensor *const *parameters, size_t count, char **err) TAMP_NOEXCEPT;

// Moves the gradients of `count` parameters to `gradients`, an array of nulls, and leaves the parameters without. After
// a failure those that were moved are in `gradients`.
void tamp_gradients_take(tamp_tensor *const *parameters, size_t count, tamp_tensor **gradients,
                         char **err) TAMP_NOEXCEPT;

// Runs the backward of a tensor of one element into the gradients of its leaves. With `retain_graph` another backward
// can lead through the same graph.
void tamp_backward(const tamp_tensor *loss, uint8_t retain_graph, char **err) TAMP_NOEXCEPT;

// Adds `gradients`, in which a null stands for none, to those of `count` parameters, in place where the dtypes allow it.
// A parameter without gets its tensor itself. After a failure some are added, and `gradients` are what they were.
void tamp_gradients_add(tamp_tensor *const *parameters, tamp_tensor *const *gradients, size_t count,
                        char **err) TAMP_NOEXCEPT;

// Makes the gradients of those of `count` parameters that are bf16 or fp16 f32: what is there is converted, and what
// comes is added up in f32.
void tamp_gradients_widen(tamp_tensor *const *parameters, size_t count, char **err) TAMP_NOEXCEPT;

// ---------------------------------------------------------------------------------------------------------- memory.cpp

// Returns the number of dimensions of a tensor and, if there is room for so many, their sizes. Fails for a nested one.
size_t tamp_sizes(const tamp_tensor *tensor, int64_t *sizes, size_t room, char **err) TAMP_NOEXCEPT;

// Which memory a parameter has, what of it, and how often that was changed. All zeros say nothing of any parameter.
typedef struct tamp_stamp {
  uintptr_t memory;  // held weakly; to be released
  uint64_t view;
  uint64_t version;
} tamp_stamp;

// Tells of `count` parameters which are not as their stamps say.
void tamp_stamps_compare(tamp_tensor *const *parameters, size_t count, const tamp_stamp *stamps, uint8_t *changed,
                         char **err) TAMP_NOEXCEPT;

// Has the stamps say how `count` parameters are now. Each holds the memory of its parameter weakly.
void tamp_stamps_take(tamp_tensor *const *parameters, size_t count, tamp_stamp *stamps, char **err) TAMP_NOEXCEPT;

// Releases the `memory` of a stamp that is no longer used. Nothing happens for zero.
void tamp_memory_release(uintptr_t memory) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------------------- unscale.cpp

enum {
  TAMP_UNSCALE_RECHECK = 1,     // look for values that only the multiplication made infinite
  TAMP_UNSCALE_CHECK_ONLY = 2,  // as if the scale were one, so that no number changes
  TAMP_UNSCALE_GENERIC = 4,     // plain operations in place of the AMP kernels
};

enum { TAMP_FINITE = 0, TAMP_NON_FINITE = 1, TAMP_ON_DEVICE = 2 };

// Multiplies the gradients of `count` parameters, all strided or COO, by 1/scale, in place. They lie on `devices`
// devices. For each of these, in the order of their first gradients, writes to `found_infs` a new f32 tensor of no
// dimensions, which is one when an element there is infinite or NaN and else zero, and to `answers` TAMP_FINITE or
// TAMP_NON_FINITE where the answer is in host memory and TAMP_ON_DEVICE elsewhere. What it takes is allocated on all
// devices before the first gradient changes: after a failure `begun` tells whether any may have changed, and no tensor
// is returned. Synchronizes only when `scale` lies on a GPU and gradients on the CPU.
void tamp_gradients_unscale(tamp_tensor *const *parameters, size_t count, const tamp_tensor *scale,
                            tamp_tensor **found_infs, uint8_t *answers, size_t devices, uint8_t options,
                            uint8_t *begun, char **err) TAMP_NOEXCEPT;

// Returns the common 2-norm of the gradients of `count` parameters, at least one, times 1/scale: a 0-dim tensor on the
// device where they all lie; f64 when they all are or, on the CPU, when f32 cannot hold it, else f32. The gradients stay
// as they are. Writes to `found_inf` a new tensor that says whether the norm is infinite or NaN, as it is when a
// gradient is, and to `answer` as tamp_gradients_unscale does. Synchronizes where that does.
tamp_tensor *tamp_gradients_norm(tamp_tensor *const *parameters, size_t count, const tamp_tensor *scale,
                                 tamp_tensor **found_inf, uint8_t *answer, char **err) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------------------- numbers.cpp

// A tensor of no dimensions that holds `value`.
tamp_tensor *tamp_number_new(double value, int8_t dtype, int8_t device_type, int8_t device_index,
                             char **err) TAMP_NOEXCEPT;

// Writes `value` to a tensor. Does not wait.
void tamp_number_set(tamp_tensor *number, double value, char **err) TAMP_NOEXCEPT;

// Lowers a tensor of one number to `most`, if it is more. Does not wait.
void tamp_number_limit(tamp_tensor *number, double most, char **err) TAMP_NOEXCEPT;

// Copies the `len` elements of `count` real tensors of one device, one tensor after the other, to `values`. Waits for
// the device, once.
void tamp_numbers_read(tamp_tensor *const *tensors, size_t count, double *values, size_t len, char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------------------- scale.cpp

// Whether any of the one-element tensors is not zero. Waits for their devices, in one transfer.
uint8_t tamp_any_nonzero(tamp_tensor *const *tensors, size_t count, char **err) TAMP_NOEXCEPT;

// One flag that is one when any of `count` flags (f32, one element, zero or one) is, and else zero: on the first GPU that
// one of them lies on, or else on the CPU. Of one flag it is that itself.
tamp_tensor *tamp_flags_join(tamp_tensor *const *flags, size_t count, char **err) TAMP_NOEXCEPT;

// How an iteration changes the scale. The last three count only where there is a tensor of patience.
typedef struct tamp_scale_rule {
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  double min_scale;
  double max_scale;
  int64_t hysteresis;   // overflows that it takes for the scale to back off
  double tolerance;     // the share of overflowing iterations below which it does not
  uint8_t consecutive;  // an iteration without overflow restores the hysteresis; otherwise growth does
} tamp_scale_rule;

// The elements of a tensor of patience: what is left of the hysteresis, and the iterations and overflows since the scale
// last backed off or could grow.
enum { TAMP_PATIENCE_HYSTERESIS = 0, TAMP_PATIENCE_ITERATIONS = 1, TAMP_PATIENCE_OVERFLOWS = 2 };

// A scale at the end of an iteration: `scale` (f32), `tracker` (i32) and `patience` (i64, or null), and what was found in
// the gradients, in `count` found_inf tensors, which may lie on several devices.
typedef struct tamp_scale_update {
  tamp_tensor *scale;
  tamp_tensor *tracker;
  tamp_tensor *patience;
  tamp_tensor *const *found_infs;
  size_t count;
  tamp_scale_rule rule;
} tamp_scale_update;

// Ends an iteration: grows or backs off each of `count` scales and counts in its tracker and its patience, all in place.
// Without patience every overflow backs a scale off. What it takes is allocated for all scales before the first changes.
// Never waits for a device that a scale lies on.
void tamp_scales_update(const tamp_scale_update *updates, size_t count, char **err) TAMP_NOEXCEPT;

// ------------------------------------------------------------------------------------------------------ loss_scale.cpp

// Whether the numbers of `count` floating or complex tensors are all finite: a bool of no dimensions on the device of
// the first. Waits only to bring the answer of a GPU to the CPU where the first tensor lies there.
tamp_tensor *tamp_all_finite(tamp_tensor *const *tensors, size_t count, char **err) TAMP_NOEXCEPT;

// ------------------------------------------------------------------------------------------------------------ clip.cpp

// Scales the gradients of `count` parameters down in place so that their common 2-norm is at most `max_norm`.
// Returns the norm before that, a 0-dim tensor on the first gradient's device; null without any gradient. With
// `error_if_nonfinite` it waits for the device to write to `is_finite` whether the norm is finite, and leaves the
// gradients alone when it is not.
tamp_tensor *tamp_clip_grad_norm(tamp_tensor *const *parameters, size_t count, double max_norm,
                                 uint8_t error_if_nonfinite, uint8_t *is_finite, char **err) TAMP_NOEXCEPT;

// The factor by which gradients of a common 2-norm come down to `max_norm`: at most one, on the norm's device.
tamp_tensor *tamp_clip_factor(const tamp_tensor *norm, double max_norm, char **err) TAMP_NOEXCEPT;

// Clamps every element of the gradients of `count` parameters to [-max, max], in place.
void tamp_clip_grad_value(tamp_tensor *const *parameters, size_t count, double max, char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------------------- optim.cpp

enum { TAMP_OPTIM_ADAM = 0, TAMP_OPTIM_ADAMW = 1, TAMP_OPTIM_SGD = 2, TAMP_OPTIM_ADAGRAD = 3 };

enum { TAMP_OPTIM_AMSGRAD = 1, TAMP_OPTIM_NESTEROV = 2, TAMP_OPTIM_MAXIMIZE = 4 };

// The options of a parameter group, by PyTorch's names. An algorithm looks at its own only.
typedef struct tamp_optim_options {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double momentum;
  double dampening;
  double lr_decay;
  uint8_t algorithm;
  uint8_t flags;
} tamp_optim_options;

// What a parameter in half precision is updated from, in f32 each time.
enum {
  TAMP_MASTER_NONE = 0,        // itself, and its state has its dtype
  TAMP_MASTER_FLOAT = 1,       // an f32 copy
  TAMP_MASTER_REMAINDER = 2,   // itself, bf16, and the 16 bits that it lacks of an f32
  TAMP_MASTER_STOCHASTIC = 3,  // itself, bf16, and the result is rounded at random
};

// A parameter and its state: tensors of its shape, dtype and device, and its f32 step count. With masters the state is
// f32, and the gradient has the parameter's dtype or is f32.
typedef struct tamp_optim_parameter {
  tamp_tensor *parameter;
  tamp_tensor *step;    // null for SGD, unless it is rounded at random
  tamp_tensor *first;   // exp_avg, momentum_buffer or sum; null for SGD without momentum
  tamp_tensor *second;  // exp_avg_sq; null unless Adam or AdamW
  tamp_tensor *third;   // max_exp_avg_sq; null without AMSGrad
  tamp_tensor *master;  // f32, or the remainder as int16; null otherwise
  tamp_stamp *stamp;    // how the parameter was when it was last what its master says; unused without a master
  uint64_t seed;        // of this parameter's random numbers, which depend on its step as well
  uint32_t options;     // an index
  uint8_t masters;
  uint8_t first_step;  // the momentum buffer starts with the gradient
  uint8_t complete;    // all of the state that its options ask for is there
} tamp_optim_parameter;

// How the gradients become those that the update takes: divided by `grad_scale`, or times its reciprocal and `clip`.
// Null for what does not apply. Where `found_inf` is not zero nothing changes at all.
typedef struct tamp_optim_scale {
  tamp_tensor *grad_scale;
  tamp_tensor *clip;
  tamp_tensor *found_inf;
} tamp_optim_scale;

// What a step does with a parameter, or why the whole step is not taken.
enum {
  TAMP_STEP_TAKEN = 0,
  TAMP_STEP_LEFT_OUT = 1,    // it has no gradient, or is frozen
  TAMP_STEP_REFUSED = 2,     // no step takes a gradient such as its own
  TAMP_STEP_STALE = 3,       // it is not as its stamp says: its master has to be renewed
  TAMP_STEP_INCOMPLETE = 4,  // some of its state has to be made
};

// Steps those of `count` parameters that have gradients, each by the options that it names, and takes new stamps of those
// with masters. Writes one of the above to each of `answers`, and changes nothing if one of them is neither of the first
// two. Checks all parameters, and allocates what it needs, before it changes any. Waits for a device only to bring what
// `scale` names from there to parameters on the CPU. The gradients of parameters on the CPU stay as they are; libtorch's
// kernels for other devices unscale them.
void tamp_optim_step(const tamp_optim_parameter *parameters, size_t count, const tamp_optim_options *options,
                     const tamp_optim_scale *scale, uint8_t *answers, char **err) TAMP_NOEXCEPT;

// The f32 number of each element of a bf16 parameter and its remainder.
tamp_tensor *tamp_master_join(const tamp_tensor *parameter, const tamp_tensor *remainder, char **err) TAMP_NOEXCEPT;

// The remainder of each f32 number in `master` that rounds to the bf16 in `parameter`, and zero for the others.
tamp_tensor *tamp_master_remainder_of(const tamp_tensor *master, const tamp_tensor *parameter,
                                      char **err) TAMP_NOEXCEPT;

// Brings `count` masters, f32 or remainders, into line with parameters that somebody else has written to. An f32 whose
// rounded number is still the parameter's stays; a remainder becomes zero. Without memory for it none changes.
void tamp_masters_renew(tamp_tensor *const *parameters, tamp_tensor *const *masters, size_t count,
                        char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------------- optim_state.cpp

// Makes a tensor like each of `count` parameters, of another dtype unless `dtype` is -1, filled with `value`, without
// history. Those of one dtype lie in one buffer on the CPU, and in few on another device. On failure none is made.
void tamp_optim_states_new(tamp_tensor *const *parameters, size_t count, int8_t dtype, double value,
                           tamp_tensor **states, char **err) TAMP_NOEXCEPT;

// Makes an f32 copy of each of `count` parameters, as above.
void tamp_masters_new(tamp_tensor *const *parameters, size_t count, tamp_tensor **masters, char **err) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------------------- function.cpp

// A custom function's place in the graph of autograd.
typedef struct tamp_node tamp_node;

// Runs backward. `grad_outputs` borrows one tensor for each output, null for a missing gradient; `grad_inputs` takes
// one for each input, given away, null for none. On failure it writes a message of tamp_string_new to `err`, without
// the function's name, and no tensor. Like the other callbacks it neither throws nor unwinds, and no two callbacks of
// one state run at once.
typedef void (*tamp_function_backward)(void *state, const tamp_node *node, tamp_tensor *const *grad_outputs,
                                       size_t outputs, tamp_tensor **grad_inputs, size_t inputs, char **err);

// Takes out of a state what forward saved, for `free_saved` to free; null where it saved nothing. It runs no code of the
// user's: a lock is held meanwhile.
typedef void *(*tamp_function_take)(void *state);

// Frees a state, or what was taken out of one, on any thread. That may run any code of the user's.
typedef void (*tamp_function_free)(void *what);

enum {
  TAMP_FUNCTION_MATERIALIZE_GRADS = 1,    // a missing gradient of an output is made zeros
  TAMP_FUNCTION_ONCE_DIFFERENTIABLE = 2,  // what backward returns cannot be differentiated
  TAMP_FUNCTION_SAVES_VALUES = 4,         // the state holds values that `take_saved` takes
};

// A function value, and how to use it.
typedef struct tamp_function {
  void *state;
  tamp_function_backward backward;
  tamp_function_take take_saved;  // backward has run and will not again
  tamp_function_free free_saved;
  tamp_function_free drop;  // frees the state
  const char *name;         // for messages; copied, `name_length` bytes of it
  size_t name_length;
  uint8_t flags;
} tamp_function;

// What is to be known of an input before forward runs.
typedef struct tamp_function_input {
  size_t uses;            // the handles that exist of the tensor
  uint8_t requires_grad;  // zero also where nothing is recorded
} tamp_function_input;

typedef struct tamp_tensors {
  tamp_tensor *const *tensors;
  size_t count;
} tamp_tensors;

// A call of forward that has ended: its inputs, and what the context was told.
typedef struct tamp_function_call {
  tamp_tensors inputs;
  const tamp_function_input *infos;  // one for each input
  tamp_tensors saved;                // undefined ones allowed
  tamp_tensors dirty;
  tamp_tensors non_differentiable;
  uint8_t recorded;  // the answer of tamp_function_begin
} tamp_function_call;

// Describes the `count` inputs, undefined ones allowed. Returns whether autograd will record the call.
uint8_t tamp_function_begin(tamp_tensor *const *inputs, size_t count, tamp_function_input *infos,
                            char **err) TAMP_NOEXCEPT;

// Makes the `count` raw outputs of forward, in place, those of an operation of autograd. Takes the state in any case
// and drops it at once where nothing is recorded. On failure the outputs are as before.
void tamp_function_record(const tamp_function *function, const tamp_function_call *call, tamp_tensor *const *outputs,
                          size_t count, char **err) TAMP_NOEXCEPT;

// The first `count` tensors that forward saved, undefined ones included. Only while backward runs.
void tamp_function_saved_tensors(const tamp_node *node, tamp_tensor **saved, size_t count, char **err) TAMP_NOEXCEPT;

// Whether the gradient of an input is wanted. Only while backward runs.
uint8_t tamp_function_needs_input_grad(const tamp_node *node, size_t input, char **err) TAMP_NOEXCEPT;

// ------------------------------------------------------------------------------------------------------- checkpoint.cpp

// Copies `len` bytes of a contiguous tensor's elements, from the `first` on, to host memory. Waits for the device.
void tamp_elements_read(const tamp_tensor *from, int64_t first, uint8_t *to, size_t len, char **err) TAMP_NOEXCEPT;

// Overwrites the elements of a contiguous tensor from the `first` on with `len` bytes. Waits for the device.
void tamp_elements_write(tamp_tensor *to, int64_t first, const uint8_t *from, size_t len, char **err) TAMP_NOEXCEPT;

// The state of a device's default generator of random numbers: uint8, one dimension. Waits for the device.
tamp_tensor *tamp_rng_state(int8_t device_type, int8_t index, char **err) TAMP_NOEXCEPT;

// Makes a device's default generator go on from a state. It stays as it was where that is none of its kind.
void tamp_rng_set_state(int8_t device_type, int8_t index, const tamp_tensor *state, char **err) TAMP_NOEXCEPT;

// ---------------------------------------------------------------------------------------------------------- testing.cpp

// Debug builds only, for this crate's own tests.
#ifdef TAMP_TESTING

enum { TAMP_TESTING_TORCH_ERROR = 0, TAMP_TESTING_BAD_ALLOC = 1, TAMP_TESTING_INT = 2 };

// Makes the calling thread's `call`-th function from now on that can fail do so, by an exception of the given kind.
// Zero calls it off. Returns what was left of the last one: zero if it has failed.
int64_t tamp_testing_fail_at(int64_t call, uint8_t kind) TAMP_NOEXCEPT;

enum { TAMP_TESTING_OVERFLOW = 0, TAMP_TESTING_FREED = 1, TAMP_TESTING_UNDEFINED = 2, TAMP_TESTING_LEAK = 3 };

// Does what a sanitizer has to find: writes behind memory or to freed memory, overflows an integer, or loses memory.
void tamp_testing_fault(uint8_t kind) TAMP_NOEXCEPT;

// Makes the optimizers of the calling thread treat the CPU as they do other devices.
void tamp_testing_as_other_device(uint8_t enabled) TAMP_NOEXCEPT;

// Enters or leaves libtorch's inference mode on the calling thread.
void tamp_testing_inference_mode(uint8_t enabled) TAMP_NOEXCEPT;

#endif

#ifdef __cplusplus
}
#endif
