// Host code that touches the memory of a device ends with a message and SIGSEGV.
#pragma once

#include <cstddef>

namespace simulated {

struct Where {
  int device;  // -1 for an address in no device's memory
  size_t offset;
};

// Has faults told, with the name of what simulates the devices. Returns whether that is possible.
bool tell_faults(const char *name, Where (*locate)(const void *address));

}  // namespace simulated
