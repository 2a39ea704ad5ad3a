// The memory of the devices: a range of addresses that the host can neither read nor write, and a second view of the
// same bytes.
#pragma once

#include <cstddef>
#include <optional>

namespace null_cuda {

struct Place {
  enum class Kind { kPageable, kPinned, kDevice };

  Kind kind;
  int device;  // for kDevice
  char *view;  // where the host may read and write the bytes
};

// Where `size` bytes at an address are. Nothing if it is device memory that is not allocated.
std::optional<Place> find(const void *address, size_t size);

// The device whose memory an address lies in; -1 if none.
int device_of(const void *address);

// Memory of the current device; null if there is no more.
void *take(size_t size);

}  // namespace null_cuda
