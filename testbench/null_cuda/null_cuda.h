// What tests and the other stand-ins ask of the null runtime. Tests find it with dlsym: NVIDIA's has none of it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Sets all counters to zero.
void null_cuda_reset(void);

// The sum of the counters whose kinds start with `prefix`, of one device; -1 adds up all devices. Kinds are those of
// the report: "launch/kernel", "launch/library", "wait/stream", "copy/to host, pinned", "capture/begin" and so on.
int64_t null_cuda_count(int32_t device, const char *prefix);

// What the calling thread has launched, and how often it has waited, since it began.
void null_cuda_thread_counts(int64_t *launches, int64_t *waits);

// Notes a call of a library that launches a kernel on a stream. Returns an error of CUDA, or 0.
int32_t null_cuda_library_call(const char *name, void *stream, const char *details);

int32_t null_cuda_current_device(void);

// Calls `run` when the work that is on the stream by now is done: at once, or in every replay if the stream is
// capturing. `drop` is called when nothing will call `run` any more.
void null_cuda_enqueue(void *stream, void (*run)(void *), void (*drop)(void *), void *data);

// The address at which the host may read and write the bytes of a device address; null if they are not allocated.
void *null_cuda_host_view(const void *address, size_t size);

// Whether copies to the host that the calling thread makes carry zeros: no kernel has written what they read.
void null_cuda_read_zeros(int32_t zeros);

#ifdef __cplusplus
}
#endif
