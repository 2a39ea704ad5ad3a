// What the environment sets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simulated {

// SIMULATED_CUDA_DEVICES: how many devices there are, from 0 to 16; 2 unless set.
constexpr int kMostDevices = 16;
int device_count();

// SIMULATED_CUDA_MEMORY_MIB: the memory of each device, 16 GiB unless set. Pages take real memory once they are used.
size_t device_memory();

// SIMULATED_CUDA_LAG: how often an event answers that it has not happened yet, 2 unless set. With 0 copies to pinned
// memory arrive at once; with `never` only when the host waits.
int64_t lag();

// SIMULATED_CUDA_TRACE: 1 prints every launch and every wait of the host, `syncs` the waits with backtraces.
bool traces_launches();
bool traces_syncs();

// SIMULATED_CUDA_REPORT: 1 prints the counters of each device at the end of the program.
bool reports();

}  // namespace simulated
