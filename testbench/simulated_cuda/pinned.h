// Host memory that a copy from a device reaches without the host's waiting for it.
#pragma once

#include <c10/core/Allocator.h>

namespace simulated {

c10::Allocator &pinned_allocator();

bool is_pinned(const void *address);

}  // namespace simulated
