// The C ABI of the feature `distributed`, to which everything at the top of border/shim.h applies.
// src/sys/distributed.rs repeats every declaration in the same order, and tests/abi.rs compares the two files.
//
// A function that communicates blocks the host until the other ranks have answered or the timeout of the group has
// passed. With CUDA tensors only the current stream waits.
#pragma once

#include "border/shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------- distributed/random.cpp
// These functions make random numbers that have to be the same on all ranks, or different on each.

// Returns the numbers from 0 to n - 1, as int64 on the CPU, in the order of torch.randperm with a new generator of this
// seed. The default generators are not used.
tamp_tensor *tamp_random_permutation(int64_t n, uint64_t seed, char **err) TAMP_NOEXCEPT;

// Seeds the default generator of one device.
void tamp_random_seed(int8_t device_type, int8_t index, uint64_t seed, char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- distributed/store.cpp
// These functions make and use c10d::Store, the dictionary through which ranks find each other.

typedef struct tamp_store tamp_store;

// Connects to the store that listens at a host and port, and with `serve` first starts it there. It serves on
// `listener`, a listening socket of which it takes ownership, or, if that is -1, on the port on all interfaces.
tamp_store *tamp_store_tcp(const char *host, uint32_t port, uint8_t serve, int64_t listener, int64_t timeout_ms,
                           char **err) TAMP_NOEXCEPT;

// Makes a store for the threads of this process.
tamp_store *tamp_store_in_process(int64_t timeout_ms, char **err) TAMP_NOEXCEPT;

// Sets a key to a text.
void tamp_store_set(const tamp_store *store, const char *key, const char *value, char **err) TAMP_NOEXCEPT;

// Waits until a key is set, or fails after the given time. Returns its text, which the caller frees.
char *tamp_store_get(const tamp_store *store, const char *key, int64_t timeout_ms, char **err) TAMP_NOEXCEPT;

// Adds 1 to the number that a key has, which begins with 0, and returns the sum.
int64_t tamp_store_count(const tamp_store *store, const char *key, char **err) TAMP_NOEXCEPT;

// Returns whether a key is set.
uint8_t tamp_store_has(const tamp_store *store, const char *key, char **err) TAMP_NOEXCEPT;

// Waits until all of the `count` keys are set, or fails after the given time.
void tamp_store_wait(const tamp_store *store, const char *const *keys, size_t count, int64_t timeout_ms,
                     char **err) TAMP_NOEXCEPT;

void tamp_store_free(tamp_store *store) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- distributed/group.cpp
// These functions make c10d::ProcessGroup and run its collectives.

typedef struct tamp_group tamp_group;

typedef struct tamp_group_options {
  const char *prefix;     // of the keys in the store; each group of a store needs another one
  const char *interface;  // the network interface to use, or null
  const char *host;       // the address to use if `interface` is null, or null for the one of this host's name
  int64_t rank;
  int64_t size;
  int64_t timeout_ms;
  uint8_t cuda;  // whether the group communicates CUDA tensors, too, by NCCL
} tamp_group_options;

// Forms a group with the other ranks, which call this as well. An operation of CPU tensors that waits while a rank sets
// the key `PREFIX/failure` of the store fails soon after.
tamp_group *tamp_group_new(const tamp_store *store, const tamp_group_options *options, char **err) TAMP_NOEXCEPT;

// Fails if groups cannot use these members of tamp_group_options.
void tamp_group_check_interface(const char *interface, const char *host, char **err) TAMP_NOEXCEPT;

// Closes the connections, also if a reducer still uses the group, so that its operations fail on all ranks.
void tamp_group_close(const tamp_group *group) TAMP_NOEXCEPT;

void tamp_group_free(tamp_group *group) TAMP_NOEXCEPT;

// Returns the index of the first of the `count` strided tensors that a result cannot be written to, or -1: its elements
// share memory or have none, or it is an inference tensor outside of inference mode.
int64_t tamp_group_unwritable(tamp_tensor *const *tensors, size_t count, char **err) TAMP_NOEXCEPT;

typedef struct tamp_gathering tamp_gathering;

// Begins to gather `len` bytes of each rank, and does not block. All ranks have the same `len`.
tamp_gathering *tamp_gathering_begin(const tamp_group *group, const uint8_t *bytes, size_t len,
                                     char **err) TAMP_NOEXCEPT;

// Blocks until all ranks have given their bytes, and writes them to `all` in the order of the ranks.
void tamp_gathering_finish(const tamp_gathering *gathering, uint8_t *all, char **err) TAMP_NOEXCEPT;

void tamp_gathering_free(tamp_gathering *gathering) TAMP_NOEXCEPT;

enum { TAMP_REDUCE_SUM = 0, TAMP_REDUCE_MIN = 1, TAMP_REDUCE_MAX = 2 };

// The tensors of the following functions are dense and contiguous, and have the same shape and dtype on all ranks.
// Otherwise gloo can abort the process.

// Replaces a tensor by the result over all ranks.
void tamp_group_all_reduce(const tamp_group *group, tamp_tensor *t, uint8_t op, char **err) TAMP_NOEXCEPT;

// Replaces a tensor by the one of rank `root`.
void tamp_group_broadcast(const tamp_group *group, tamp_tensor *t, int64_t root, char **err) TAMP_NOEXCEPT;

// Writes the tensors of all ranks to `all`, whose first dimension is theirs times the number of ranks.
void tamp_group_all_gather(const tamp_group *group, tamp_tensor *all, const tamp_tensor *t, char **err) TAMP_NOEXCEPT;

// Writes this rank's part of the sum of `all` over the ranks to `part`.
void tamp_group_reduce_scatter(const tamp_group *group, tamp_tensor *part, const tamp_tensor *all,
                               char **err) TAMP_NOEXCEPT;

// Waits for all ranks. On a failure the message names the ranks that are missing.
void tamp_group_monitored_barrier(const tamp_group *group, int64_t timeout_ms, char **err) TAMP_NOEXCEPT;

// --------------------------------------------------------------------------------------------- distributed/reducer.cpp
// These functions average gradients over the ranks of a group while the backward pass runs, by c10d::Reducer.

typedef struct tamp_reducer tamp_reducer;

enum { TAMP_COMPRESS_NONE = 0, TAMP_COMPRESS_FP16 = 1, TAMP_COMPRESS_BF16 = 2 };

typedef struct tamp_reducer_options {
  int64_t bucket_bytes;  // the size of a bucket, or 0 for PyTorch's default: 1 MiB for the first one, 25 for the others
  uint8_t compression;   // the dtype in which gradients are communicated
  uint8_t divide_first;  // whether they are divided by the number of ranks before they are compressed
  uint8_t find_unused_parameters;
  uint8_t gradient_as_bucket_view;
} tamp_reducer_options;

// Averages the gradients of the `count` parameters from now on. `names` has the name of each. All ranks call this with
// the same parameters and options.
tamp_reducer *tamp_reducer_new(const tamp_group *group, tamp_tensor *const *parameters, const char *const *names,
                               size_t count, const tamp_reducer_options *options, char **err) TAMP_NOEXCEPT;

void tamp_reducer_free(tamp_reducer *reducer) TAMP_NOEXCEPT;

enum { TAMP_PARAMETERS_SAME = 0, TAMP_PARAMETERS_CAST = 1, TAMP_PARAMETERS_FROZEN = 2, TAMP_PARAMETERS_RESHAPED = 3 };

// Returns what has happened to a parameter since the reducer was made, and its index.
uint8_t tamp_reducer_parameters(const tamp_reducer *reducer, size_t *index, char **err) TAMP_NOEXCEPT;

// Returns whether the next forward pass may communicate, to put the parameters into buckets in the order in which their
// gradients were computed.
uint8_t tamp_reducer_may_rebuild(const tamp_reducer *reducer, char **err) TAMP_NOEXCEPT;

// To be called before a forward pass. `sync` is whether its gradients will be averaged: by any backward pass, unless
// unused parameters are looked for. Returns whether autograd records the forward pass.
uint8_t tamp_reducer_before_forward(tamp_reducer *reducer, uint8_t sync, char **err) TAMP_NOEXCEPT;

// Returns whether the next backward pass can be undone by removing the gradients of all parameters.
uint8_t tamp_reducer_can_undo(const tamp_reducer *reducer, char **err) TAMP_NOEXCEPT;

// To be called before a backward pass whose gradients are averaged, also where its forward pass was without `sync`, or
// where another backward pass has been averaged since. Unless `agreement` is null, nothing is averaged before all ranks
// have given their bytes, and nothing at all if these differ.
void tamp_reducer_before_backward(tamp_reducer *reducer, const tamp_tensor *loss, const tamp_gathering *agreement,
                                  char **err) TAMP_NOEXCEPT;

// To be called after such a backward pass. Fails if parameters did not receive a gradient.
void tamp_reducer_after_backward(tamp_reducer *reducer, char **err) TAMP_NOEXCEPT;

// Returns the index of a parameter that has received several gradients in such a backward pass, of which only the first
// is sure to be averaged, or -1.
int64_t tamp_reducer_repeated(const tamp_reducer *reducer, char **err) TAMP_NOEXCEPT;

// Overwrites the `count` tensors by those of rank `root`, many at a time.
void tamp_group_broadcast_all(const tamp_group *group, tamp_tensor *const *tensors, size_t count, int64_t root,
                              char **err) TAMP_NOEXCEPT;

// ----------------------------------------------------------------------------------------------- distributed/spawn.cpp
// These functions concern the processes of ranks, and the process that has started them.

// Remembers signals that end a program, such as SIGINT and SIGTERM, instead of handling them as before. Not to be
// called again before tamp_signals_release().
void tamp_signals_catch(char **err) TAMP_NOEXCEPT;

// Handles the signals as before tamp_signals_catch().
void tamp_signals_release(void) TAMP_NOEXCEPT;

// Returns the last signal since the previous call, or 0.
int64_t tamp_signals_caught(void) TAMP_NOEXCEPT;

// Sends a signal to the process group of a child that has not been waited for, and lets it continue if it is stopped.
void tamp_process_signal(int64_t process, int64_t signal, char **err) TAMP_NOEXCEPT;

// Asks Linux to kill this process when the thread that has started it ends. Returns an errno, which is ESRCH if
// `parent` has ended already. Can be called between fork and exec.
int64_t tamp_process_end_with(int64_t parent) TAMP_NOEXCEPT;

#ifdef __cplusplus
}
#endif
