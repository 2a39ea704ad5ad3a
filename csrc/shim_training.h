// The C ABI of what a training run needs besides the scaler and the optimizers, to which everything at the top of shim.h
// applies. src/sys/training.rs repeats every declaration in the same order, and tests/abi.rs compares the two files.
#pragma once

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// --------------------------------------------------------------------------------------------------------- average.cpp
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

// ------------------------------------------------------------------------------------------------------ statistics.cpp
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

// ---------------------------------------------------------------------------------------------------------- spikes.cpp
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

// --------------------------------------------------------------------------------------------------- device_memory.cpp
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

#ifdef __cplusplus
}
#endif
