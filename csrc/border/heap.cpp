// What the C library does with memory that is freed.

#include <cstdint>
#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "border/shim.h"

extern "C" uint8_t tamp_heap_keep() noexcept {
#ifdef __GLIBC__
  // Large blocks come from the heap as well, which never shrinks and grows by 64 MiB at a time. This is the heap of the
  // main thread: glibc maps blocks of other threads that are larger than their heaps, whatever the options are. With a
  // single heap for all (M_ARENA_MAX), the threads of a parallel matrix product wait for each other.
  const bool trim = mallopt(M_TRIM_THRESHOLD, -1) == 1;
  const bool map = mallopt(M_MMAP_MAX, 0) == 1;
  const bool grow = mallopt(M_TOP_PAD, 64 << 20) == 1;
  return trim && map && grow ? 1 : 0;
#else
  return 0;
#endif
}
