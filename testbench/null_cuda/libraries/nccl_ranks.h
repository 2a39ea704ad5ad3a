// Communicators of NCCL: ranks are threads or processes of this machine, which meet in shared memory.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

// What all ranks of a communicator share, before the bytes that each of them gives to the others.
struct Shared {
  std::atomic<int> arrived, generation, aborted;
};

struct ncclComm {
  int rank, size, device;
  std::string name;
  Shared *shared = nullptr;
  std::atomic<bool> is_aborted{false};

  // The bytes that a rank gives.
  char *slot(int of) const;
  std::vector<const char *> slots() const;
  size_t bytes() const;
};

namespace null_cuda {

// The most bytes that a rank gives at once.
constexpr size_t kChunk = 1 << 20;

// Maps the shared memory. Null if that is impossible.
ncclComm *open(const std::string &name, int size, int rank, int device);
void close(ncclComm *comm);

// Waits until all ranks have come. Returns whether they have: none may have aborted, or be gone for minutes.
bool meet(ncclComm &comm);

// Gives `size` bytes to all ranks, in chunks. `take(at, n)` reads the slots, which hold the bytes from `at` on.
ncclResult_t exchange(ncclComm &comm, const char *bytes, size_t size, const std::function<void(size_t, size_t)> &take);

}  // namespace null_cuda
