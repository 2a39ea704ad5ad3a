// NCCL. A collective is done when its call returns, on the memory of the devices, and is one launch on its stream.

#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "library.h"
#include "nccl_ranks.h"
#include "nccl_reductions.h"

using namespace null_cuda;

namespace {

using Work = std::function<ncclResult_t()>;

// Calls between ncclGroupStart and ncclGroupEnd are made by the latter.
thread_local int depth = 0;
thread_local std::map<ncclComm *, std::vector<Work>> grouped;

ncclResult_t run(ncclComm *comm, Work work) {
  if (depth == 0) return work();
  grouped[comm].push_back(std::move(work));
  return ncclSuccess;
}

char *view(const void *address, size_t size) {
  return size == 0 ? nullptr : static_cast<char *>(null_cuda_host_view(address, size));
}

// Counts the collective, and runs it unless a group is open.
ncclResult_t collective(const char *name, ncclComm *comm, cudaStream_t stream, size_t bytes, Work work) {
  const std::string details = std::to_string(bytes) + " bytes, rank " + std::to_string(comm->rank);
  if (null_cuda_library_call(name, stream, details.c_str()) != 0) return ncclUnhandledCudaError;
  return run(comm, std::move(work));
}

ncclResult_t join(ncclComm_t *out, int size, const ncclUniqueId &id, int rank) {
  const std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
  ncclComm *comm = open(name, size, rank, null_cuda_current_device());
  if (comm == nullptr) return ncclSystemError;
  *out = comm;
  return run(comm, [comm] {
    if (!meet(*comm)) return ncclRemoteError;
    // All have come, and nobody needs the name any more.
    if (comm->rank == 0) shm_unlink(comm->name.c_str());
    return ncclSuccess;
  });
}

ncclResult_t run_all(const std::vector<Work> &works) {
  for (const Work &work : works) {
    if (const ncclResult_t error = work()) return error;
  }
  return ncclSuccess;
}

// The ranks of several communicators may wait for each other.
ncclResult_t run_beside(const std::map<ncclComm *, std::vector<Work>> &all) {
  std::atomic<int> result{ncclSuccess};
  std::vector<std::thread> threads;
  for (const auto &[comm, works] : all) {
    threads.emplace_back([&result, &works = works] {
      if (const ncclResult_t error = run_all(works)) result = error;
    });
  }
  for (auto &thread : threads) thread.join();
  return static_cast<ncclResult_t>(result.load());
}

}  // namespace

NULL_CUDA_API const char *ncclGetErrorString(ncclResult_t result) {
  if (result == ncclSuccess) return "no error";
  return result == ncclRemoteError ? "remote process exited or there was a network error" : "unhandled error";
}

NULL_CUDA_API const char *ncclGetLastError(ncclComm_t) { return ""; }

NULL_CUDA_API ncclResult_t ncclGetVersion(int *version) { return give<ncclResult_t>(version, NCCL_VERSION_CODE); }

NULL_CUDA_API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/null_cuda-%d-%08x%08x", getpid(), random(), random());
  return ncclSuccess;
}

NULL_CUDA_API ncclResult_t ncclCommInitRank(ncclComm_t *out, int size, ncclUniqueId id, int rank) {
  return join(out, size, id, rank);
}

NULL_CUDA_API ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                                                  ncclConfig_t *) {
  return join(out, size, id, rank);
}

NULL_CUDA_API ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int size, int rank, int, ncclUniqueId *ids,
                                                    ncclConfig_t *) {
  return join(out, size, ids[0], rank);
}

NULL_CUDA_API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

NULL_CUDA_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  close(comm);
  return ncclSuccess;
}

// Another thread may still be in a collective, so that the communicator stays.
NULL_CUDA_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->is_aborted = true;
  comm->shared->aborted = 1;
  return ncclSuccess;
}

NULL_CUDA_API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
  return give<ncclResult_t>(error, ncclSuccess);
}

NULL_CUDA_API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  return give<ncclResult_t>(count, comm->size);
}

NULL_CUDA_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  return give<ncclResult_t>(rank, comm->rank);
}

NULL_CUDA_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
  return give<ncclResult_t>(device, comm->device);
}

NULL_CUDA_API ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

NULL_CUDA_API ncclResult_t ncclGroupEnd() {
  if (--depth > 0) return ncclSuccess;
  const auto all = std::exchange(grouped, {});
  return all.size() == 1 ? run_all(all.begin()->second) : run_beside(all);
}

NULL_CUDA_API ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                         ncclComm_t comm, cudaStream_t stream) {
  const size_t each = size_of(type), bytes = count * each;
  return collective("ncclAllReduce", comm, stream, bytes, [=] {
    char *to = view(out, bytes);
    // What the ranks give lies in their slots by then, so that `out` may be `in`.
    return exchange(*comm, view(in, bytes), bytes,
                    [&](size_t at, size_t n) { reduce(to + at, comm->slots(), n / each, type, op); });
  });
}

NULL_CUDA_API ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      int root, ncclComm_t comm, cudaStream_t stream) {
  const size_t each = size_of(type), bytes = count * each;
  return collective("ncclReduce", comm, stream, bytes, [=] {
    char *to = comm->rank == root ? view(out, bytes) : nullptr;
    return exchange(*comm, view(in, bytes), bytes, [&](size_t at, size_t n) {
      if (to != nullptr) reduce(to + at, comm->slots(), n / each, type, op);
    });
  });
}

NULL_CUDA_API ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                                         ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * size_of(type);
  return collective("ncclBroadcast", comm, stream, bytes, [=] {
    const char *from = comm->rank == root ? view(in, bytes) : nullptr;
    char *to = view(out, bytes);
    return exchange(*comm, from, bytes, [&](size_t at, size_t n) { memcpy(to + at, comm->slot(root), n); });
  });
}

NULL_CUDA_API ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                     cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

NULL_CUDA_API ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                                         cudaStream_t stream) {
  const size_t bytes = count * size_of(type);
  return collective("ncclAllGather", comm, stream, bytes, [=] {
    char *to = view(out, bytes * static_cast<size_t>(comm->size));
    return exchange(*comm, view(in, bytes), bytes, [&](size_t at, size_t n) {
      for (int rank = 0; rank < comm->size; ++rank) {
        memcpy(to + static_cast<size_t>(rank) * bytes + at, comm->slot(rank), n);
      }
    });
  });
}

NULL_CUDA_API ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type,
                                             ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  const size_t each = size_of(type), bytes = count * each;
  return collective("ncclReduceScatter", comm, stream, bytes, [=] {
    const char *from = view(in, bytes * static_cast<size_t>(comm->size));
    char *to = view(out, bytes);
    for (int part = 0; part < comm->size; ++part) {
      const auto take = [&](size_t at, size_t n) {
        if (part == comm->rank) reduce(to + at, comm->slots(), n / each, type, op);
      };
      const char *given = from + static_cast<size_t>(part) * bytes;
      if (const ncclResult_t error = exchange(*comm, given, bytes, take)) return error;
    }
    return ncclSuccess;
  });
}
