// The C ABI of recordings: what a stretch of a program computed, operator by operator. Everything at the top of
// border/shim.h applies. src/sys/insight.rs repeats every declaration in the same order, and tests/abi.rs compares the
// two files.
#pragma once

#include "border/shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// ------------------------------------------------------------------------------------------------- insight/insight.cpp
// These functions record operators and backward nodes with libtorch's RecordFunction. Without a recording, nothing is
// called back.

// What an operator ran on the calling thread, and on the threads of a backward pass that this thread started.
typedef struct tamp_recording tamp_recording;

// Kinds of events.
enum { TAMP_EVENT_OPERATOR = 0, TAMP_EVENT_NODE = 1, TAMP_EVENT_NAME = 2 };

// How an operator used a tensor: read it, wrote to it, or returned another view of an input. What it writes is among the
// inputs, too, as it was before; TAMP_USE_OVERWRITE is an input whose former numbers do not matter.
enum { TAMP_USE_READ = 0, TAMP_USE_WRITE = 1, TAMP_USE_VIEW = 2, TAMP_USE_OVERWRITE = 3 };

// Whether an operator's results were compared with a reference's: no, because it is a view or a copy; yes; or no, because
// they are the reference's own, or the reference has no counterpart.
enum { TAMP_COMPARED_NOT = 0, TAMP_COMPARED = 1, TAMP_COMPARED_ALONE = 2 };

// How many of a tensor's sizes are recorded.
enum { TAMP_MOST_SIZES = 8 };

// A tensor of an event. `memory` numbers the memory that tensors share, in the order of their appearance. The counts
// and the largest finite absolute value are there if `known` is not zero. `sizes` has the first of its `dims` sizes.
typedef struct tamp_recorded_tensor {
  int64_t memory;
  int64_t parameter;  // its place among the parameters, or -1
  int64_t offset;     // of its first number in the memory, in elements
  int64_t version;    // how often it was written, as autograd counts
  int64_t elements;
  int64_t positive_infinite;
  int64_t negative_infinite;
  int64_t nan;
  double largest;
  int64_t sizes[TAMP_MOST_SIZES];
  int8_t dtype;
  uint8_t known;
  uint8_t usage;
  uint8_t dims;
  uint8_t element_bytes;
  int8_t device_type;
  int8_t device_index;
} tamp_recorded_tensor;

// An operator, a backward node, or a name that the program gave to a stretch. `parent` is the event in which it ran, or
// -1, and `ended` its place in the order in which events ended, or -1. `sequence` ties a node to the operators that
// ran, on the thread `forward_thread`, when autograd made it; a name with one is the call of a custom function.
// `repeated` is 1 if the operator's numbers overflowed and it was run again in f32; then `repeated_largest` is the
// largest absolute value, which may be infinite or NaN.
//
// If `compared` is TAMP_COMPARED, `difference` is the norm of the difference between the results and the reference,
// `norm` that of the reference, and `cosine` the cosine of the angle between the two.
//
// `autocast` is the dtype of the autocast region in which an operator was called, or -1 outside of one and in the call
// that autocast makes itself. `composite` is 1 for an operator without a kernel of its own, which calls others. Bit i of
// `flags` is the i-th boolean among an operator's arguments. In a timed recording, an operator ran from `started` to
// `ended_at`, in nanoseconds of a clock of the process, and occupied its thread from `entered` to `left`, which include
// the recording's own work. `size` is that of an operator in the rules of overrides.cpp.
typedef struct tamp_recorded_event {
  const char *name;
  const tamp_recorded_tensor *inputs;
  const tamp_recorded_tensor *outputs;
  size_t input_count;
  size_t output_count;
  int64_t parent;
  int64_t ended;
  int64_t sequence;
  uint64_t thread;
  uint64_t forward_thread;
  double repeated_largest;
  double difference;
  double norm;
  double cosine;
  int64_t entered;
  int64_t started;
  int64_t ended_at;
  int64_t left;
  uint64_t size;
  uint32_t flags;
  uint8_t kind;
  uint8_t repeated;
  uint8_t compared;
  int8_t autocast;
  uint8_t composite;
} tamp_recorded_event;

// The results of a run, with which later runs are compared: those of the operators that the program calls in the forward
// pass, but for views and copies.
typedef struct tamp_reference tamp_reference;
tamp_reference *tamp_reference_new(char **err) TAMP_NOEXCEPT;
void tamp_reference_free(tamp_reference *reference) TAMP_NOEXCEPT;

// What a recording notes of operators: the numbers of their results; times, which synchronizes with the devices of an
// operator's tensors where it begins and ends, because the host cannot time a kernel otherwise; or numbers and one of
// these: it becomes the reference, is compared with it, or is compared and then rounds to a dtype what the last compared
// run returned in half precision, and the gradients that belong to it.
enum {
  TAMP_RECORD_NUMBERS = 0,
  TAMP_RECORD_TIMES = 1,
  TAMP_RECORD_REFERENCE = 2,
  TAMP_RECORD_COMPARED = 3,
  TAMP_RECORD_ROUNDED = 4
};

// Begins a recording on the calling thread, which knows `count` parameters by their memory. It ends when it is stopped
// on the same thread or freed, and keeps the reference alive, which the last three kinds need. `dtype` is that of
// TAMP_RECORD_ROUNDED. Fails if 16 recordings are running in this process. Counting numbers synchronizes.
tamp_recording *tamp_recording_start(tamp_tensor *const *parameters, size_t count, uint8_t how,
                                     const tamp_reference *reference, int8_t dtype, char **err) TAMP_NOEXCEPT;

// Whether a compared run called other operators than the reference.
uint8_t tamp_recording_differs(const tamp_recording *recording) TAMP_NOEXCEPT;

// Ends a recording, which can be read from now on. Fails if a callback failed.
void tamp_recording_stop(tamp_recording *recording, char **err) TAMP_NOEXCEPT;

// The number of events, and one of them. What it points to lives as long as the recording.
size_t tamp_recording_count(const tamp_recording *recording) TAMP_NOEXCEPT;
void tamp_recording_event(const tamp_recording *recording, size_t index, tamp_recorded_event *out,
                          char **err) TAMP_NOEXCEPT;

// Returns the number of a tensor's memory in a recording, or -1 if it did not appear there.
int64_t tamp_recording_memory(const tamp_recording *recording, const tamp_tensor *t, char **err) TAMP_NOEXCEPT;

// A tensor that autograd has saved, or that a node of this crate keeps by itself. `event` is the operator that ran, or -1,
// `tensor` what was saved, and `storage_bytes` the size of its whole memory. `is_weight` is 1 for a leaf, such as a weight,
// and for views and casts of one that is trained; `has_history` is 1 for other tensors that are computed from one, and
// `is_activation` for those that other forms keep in fewer bits. `is_small_part` is 1 for parts of an activation of which
// they keep nothing else. `is_free` is 1 if nothing holds the memory any more.
typedef struct tamp_saved_tensor {
  tamp_recorded_tensor tensor;
  int64_t event;
  int64_t storage_bytes;
  uint8_t is_weight;
  uint8_t has_history;
  uint8_t is_activation;
  uint8_t is_small_part;
  uint8_t is_free;
} tamp_saved_tensor;

// Returns a way in which saved tensors are kept as they are, and noted in the recording, which has to be freed later.
tamp_saved_tensors *tamp_recording_saves(tamp_recording *recording, char **err) TAMP_NOEXCEPT;

// The number of tensors that were noted, and one of them.
size_t tamp_recording_saved_count(const tamp_recording *recording) TAMP_NOEXCEPT;
void tamp_recording_saved(const tamp_recording *recording, size_t index, tamp_saved_tensor *out,
                          char **err) TAMP_NOEXCEPT;

void tamp_recording_free(tamp_recording *recording) TAMP_NOEXCEPT;

// A name for what the calling thread runs until it is ended, in the recordings of this thread and in libtorch's
// profiler.
typedef struct tamp_name tamp_name;
tamp_name *tamp_name_begin(const char *name, char **err) TAMP_NOEXCEPT;
void tamp_name_end(tamp_name *name) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- insight/emulation.cpp
// These functions emulate half precision in f32 on the calling thread, and on the threads of its backward passes.

typedef struct tamp_emulation tamp_emulation;

// What the enabled regions of a thread, and of the threads of its backward passes, are: what the program says; switched
// off; or f32, in which what half precision would round is rounded at random.
enum { TAMP_REGIONS_AS_GIVEN = 0, TAMP_REGIONS_OFF = 1, TAMP_REGIONS_EMULATED = 2 };

// How emulated regions round: at random to the numbers of their dtype; the same, but with the exponents of f32, so that
// nothing is too small or too large; or not at all, so that every number is that of f32.
enum { TAMP_ROUNDING_RANDOM = 0, TAMP_ROUNDING_UNBOUNDED = 1, TAMP_ROUNDING_NONE = 2 };

// The dtype and the type of device of the regions to emulate, which are those that are open with the dtype f32; the
// operators that autocast would run in half precision there, and those that it would run in f32, by name without
// overload; the seed of the rounding; what the regions are; and how they round.
typedef struct tamp_emulated {
  const char *const *lower;
  const char *const *f32;
  size_t lower_count;
  size_t f32_count;
  uint64_t seed;
  int8_t dtype;
  int8_t device_type;
  uint8_t regions;
  uint8_t rounding;
} tamp_emulated;

// The dtypes in half precision that operators have returned.
enum { TAMP_RETURNED_BFLOAT16 = 1, TAMP_RETURNED_HALF = 2 };

// Begins to note what operators return and, if the regions are emulated, to round at random what half precision would
// round. It ends on the same thread. Fails if the thread is emulating already.
tamp_emulation *tamp_emulation_begin(const tamp_emulated *how, char **err) TAMP_NOEXCEPT;
// What the regions of the calling thread are.
uint8_t tamp_emulation_regions(void) TAMP_NOEXCEPT;
// Marks tensors that half precision would hold in half precision.
void tamp_emulation_mark(tamp_emulation *emulation, tamp_tensor *const *tensors, size_t count,
                         char **err) TAMP_NOEXCEPT;
uint8_t tamp_emulation_returned(const tamp_emulation *emulation) TAMP_NOEXCEPT;
void tamp_emulation_end(tamp_emulation *emulation) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- insight/exponents.cpp
// These functions count the exponents of gradients, where these are.

// The bins of a row: the zeros, the infinities, the NaNs, and one bin for each exponent. The exponent of x is the whole
// part of log2|x|. The first such bin is for the exponent -160, and the last for 128; what is beyond them is in them.
enum { TAMP_BIN_ZERO = 0, TAMP_BIN_INFINITE = 1, TAMP_BIN_NAN = 2, TAMP_BIN_EXPONENTS = 3, TAMP_BINS = 292 };
enum { TAMP_EXPONENTS_BELOW_ZERO = 160 };

// The places in the counts, an i64 tensor: how often gradients were counted, in how many of these one was not finite,
// and the first bin of the first row.
enum { TAMP_COUNTS_OBSERVED = 0, TAMP_COUNTS_NON_FINITE = 1, TAMP_COUNTS_ROWS = 2 };

// A parameter, the row of its gradient, and whether the gradient has been divided by the scale.
typedef struct tamp_counted_gradient {
  const tamp_tensor *parameter;
  int64_t row;
  uint8_t unscaled;
} tamp_counted_gradient;

// Adds the exponents of gradients to `counts`, or begins new ones without it. The exponent of the scale, which has one
// element on any device, is subtracted from those of gradients that it still multiplies; without a scale, nothing is.
// Duplicate indices of a sparse gradient are not added up. Returns the new counts, on the device of the old ones if
// that is not the CPU, and otherwise on that of the first gradient that is not on the CPU. Synchronizes only if the
// scale is on another device and a gradient on the CPU.
tamp_tensor *tamp_exponents_count(const tamp_tensor *counts, const tamp_counted_gradient *gradients, size_t count,
                                  int64_t rows, const tamp_tensor *scale, char **err) TAMP_NOEXCEPT;

// ------------------------------------------------------------------------------------------------- insight/history.cpp
// These functions keep a history of steps.

// The numbers of a step in a history: the scale, the flag that is not zero if the step was skipped, the norm of the
// gradients, the loss, the learning rate, and a sum of TAMP_STEP_HAS_…, which says what was known.
enum {
  TAMP_STEP_SCALE = 0,
  TAMP_STEP_FLAG = 1,
  TAMP_STEP_NORM = 2,
  TAMP_STEP_LOSS = 3,
  TAMP_STEP_RATE = 4,
  TAMP_STEP_KNOWN = 5,
  TAMP_STEP_NUMBERS = 6
};
enum { TAMP_STEP_HAS_NORM = 1, TAMP_STEP_HAS_LOSS = 2, TAMP_STEP_HAS_VERDICT = 4 };

// A number of a step: a tensor of one element on any device, or without one a number of the host.
typedef struct tamp_step_number {
  const tamp_tensor *on_device;
  double on_host;
} tamp_step_number;

// Writes the TAMP_STEP_NUMBERS numbers of a step to a row of `history`, an f64 tensor of `length` rows, or to a new one
// without it. The row is `row`, or with `count`, an f64 tensor of one element on the device of the result, its number
// modulo `length`; `count` is increased by one afterwards, and `row` ignored. Returns the history, which is moved to the
// device of the count, or of the first number that is not on the CPU, if it was on the CPU. Does not synchronize. On
// failure the history is as before.
tamp_tensor *tamp_history_record(const tamp_tensor *history, int64_t length, int64_t row, tamp_tensor *count,
                                 const tamp_step_number *numbers, char **err) TAMP_NOEXCEPT;

#ifdef __cplusplus
}
#endif
