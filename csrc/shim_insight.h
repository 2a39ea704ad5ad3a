// The C ABI of recordings: what a stretch of a program computed, operator by operator. Everything at the top of shim.h
// applies. src/sys/insight.rs repeats every declaration in the same order, and tests/abi.rs compares the two files.
#pragma once

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// --------------------------------------------------------------------------------------------------------- insight.cpp
// These functions record operators and backward nodes with libtorch's RecordFunction. Without a recording, nothing is
// called back.

// What an operator ran on the calling thread, and on the threads of a backward pass that this thread started.
typedef struct tamp_recording tamp_recording;

// Kinds of events.
enum { TAMP_EVENT_OPERATOR = 0, TAMP_EVENT_NODE = 1, TAMP_EVENT_NAME = 2 };

// How an operator used a tensor: read it, wrote to it, or returned another view of an input. What it writes is among the
// inputs, too, as it was before; TAMP_USE_OVERWRITE is an input whose former numbers do not matter.
enum { TAMP_USE_READ = 0, TAMP_USE_WRITE = 1, TAMP_USE_VIEW = 2, TAMP_USE_OVERWRITE = 3 };

// How many of a tensor's sizes are recorded.
enum { TAMP_MOST_SIZES = 8 };

// A tensor of an event. `memory` numbers the memory that tensors share, in the order of their appearance. The counts
// and the largest finite absolute value are there if `known` is not zero. `sizes` has the first of its `dims` sizes.
typedef struct tamp_recorded_tensor {
  int64_t memory;
  int64_t parameter;  // its place among the parameters, or -1
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
// ran, on the thread `forward_thread`, when autograd made it. `repeated` is 1 if the operator's numbers overflowed and
// it was run again in f32; then `repeated_largest` is the largest absolute value, which may be infinite or NaN.
//
// `autocast` is the dtype of the autocast region in which an operator was called, or -1 outside of one and in the call
// that autocast makes itself. `composite` is 1 for an operator without a kernel of its own, which calls others. Bit i of
// `flags` is the i-th boolean among an operator's arguments. In a timed recording,
// an operator ran from `started` to `ended_at`, in nanoseconds of a clock of the process, and occupied its thread from
// `entered` to `left`, which include the recording's own work.
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
  int64_t entered;
  int64_t started;
  int64_t ended_at;
  int64_t left;
  uint32_t flags;
  uint8_t kind;
  uint8_t repeated;
  int8_t autocast;
  uint8_t composite;
} tamp_recorded_event;

// Begins a recording on the calling thread, which knows `count` parameters by their memory. It ends when it is stopped
// on the same thread or freed. Fails if 16 recordings are running in this process. Every operator's numbers are
// counted, which synchronizes.
tamp_recording *tamp_recording_start(tamp_tensor *const *parameters, size_t count, char **err) TAMP_NOEXCEPT;

// The same with times instead of numbers. Synchronizes with the devices of an operator's tensors where it begins and
// ends, because the host cannot time a kernel otherwise.
tamp_recording *tamp_recording_start_timed(tamp_tensor *const *parameters, size_t count, char **err) TAMP_NOEXCEPT;

// Ends a recording, which can be read from now on. Fails if a callback failed.
void tamp_recording_stop(tamp_recording *recording, char **err) TAMP_NOEXCEPT;

// The number of events, and one of them. What it points to lives as long as the recording.
size_t tamp_recording_count(const tamp_recording *recording) TAMP_NOEXCEPT;
void tamp_recording_event(const tamp_recording *recording, size_t index, tamp_recorded_event *out,
                          char **err) TAMP_NOEXCEPT;

// Returns the number of a tensor's memory in a recording, or -1 if it did not appear there.
int64_t tamp_recording_memory(const tamp_recording *recording, const tamp_tensor *t, char **err) TAMP_NOEXCEPT;

void tamp_recording_free(tamp_recording *recording) TAMP_NOEXCEPT;

// A name for what the calling thread runs until it is ended, in the recordings of this thread and in libtorch's
// profiler.
typedef struct tamp_name tamp_name;
tamp_name *tamp_name_begin(const char *name, char **err) TAMP_NOEXCEPT;
void tamp_name_end(tamp_name *name) TAMP_NOEXCEPT;

#ifdef __cplusplus
}
#endif
