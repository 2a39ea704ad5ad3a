// What the C library does with memory that is freed.

#include <cstdint>
#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "shim.h"

extern "C" uint8_t tamp_heap_keep() noexcept {
#ifdef __GLIBC__
  // Large blocks come from the heap as well, which never shrinks and grows by 64 MiB at a time. All threads use this
  // heap: glibc maps the large blocks of a thread with a heap of its own whatever the options are.
  const bool trim = mallopt(M_TRIM_THRESHOLD, -1) == 1;
  const bool map = mallopt(M_MMAP_MAX, 0) == 1;
  const bool grow = mallopt(M_TOP_PAD, 64 << 20) == 1;
  const bool share = mallopt(M_ARENA_MAX, 1) == 1;
  return trim && map && grow && share ? 1 : 0;
#else
  return 0;
#endif
}
