#include "record.h"

#include <cxxabi.h>
#include <execinfo.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "../null_cuda.h"
#include "devices.h"
#include "settings.h"

namespace null_cuda {
namespace {

using Counters = std::map<std::string, int64_t>;

// By device. Never destroyed: libtorch frees memory after everything else.
std::map<int, Counters> &counters() {
  static auto *const all = new std::map<int, Counters>;
  return *all;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local int64_t launches_of_thread = 0, waits_of_thread = 0;

int64_t sum(const Counters &of, const std::string &prefix) {
  int64_t out = 0;
  for (auto it = of.lower_bound(prefix); it != of.end() && it->first.starts_with(prefix); ++it) out += it->second;
  return out;
}

// A line of `backtrace_symbols`, "library(mangled+offset) [address]", with the name as it was written.
std::string readable(const std::string &line) {
  const size_t open = line.find('('), plus = line.find('+', open);
  if (open == std::string::npos || plus == std::string::npos || plus == open + 1) return line;
  int status = 0;
  char *plain = abi::__cxa_demangle(line.substr(open + 1, plus - open - 1).c_str(), nullptr, nullptr, &status);
  std::string out = status == 0 ? line.substr(line.rfind('/', open) + 1, open - line.rfind('/', open)) + plain : line;
  std::free(plain);
  return out;
}

void print_backtrace() {
  void *frames[64];
  const int count = backtrace(frames, 64);
  char **lines = backtrace_symbols(frames, count);
  for (int i = 2; i < count; ++i) fprintf(stderr, "    %.240s\n", readable(lines[i]).c_str());
  std::free(lines);
}

void trace(const std::string &kind, int device, const std::string &details) {
  const bool is_wait = kind.starts_with("wait/");
  const bool traced = simulated::traces_launches() && (is_wait || kind.starts_with("launch/"));
  if (!traced && !(simulated::traces_syncs() && is_wait)) return;
  fprintf(stderr, "null cuda:%d  %s %s\n", device, kind.c_str(), details.c_str());
  if (simulated::traces_syncs()) print_backtrace();
}

// What each device did, by kind, when the program ends.
struct Report {
  ~Report() {
    if (!simulated::reports()) return;
    for (const auto &[device, of] : counters()) {
      if (device < 0 || of.empty()) continue;
      fprintf(stderr, "null cuda:%d  %lld launches, %lld host synchronizations\n", device,
              static_cast<long long>(sum(of, "launch/")), static_cast<long long>(sum(of, "wait/")));
      for (const auto &[kind, n] : of) fprintf(stderr, "    %lld %s\n", static_cast<long long>(n), kind.c_str());
    }
  }
};
const Report report;

}  // namespace

std::recursive_mutex &lock() {
  static auto *const mutex = new std::recursive_mutex;
  return *mutex;
}

void note(const std::string &kind, int device, const std::string &details) {
  const Guard guard(lock());
  ++counters()[device][kind];
  if (kind.starts_with("launch/")) ++launches_of_thread;
  if (kind.starts_with("wait/")) ++waits_of_thread;
  trace(kind, device, details);
}

cudaError_t fail(cudaError_t error, const char *function) {
  if (error == cudaSuccess) return error;
  if (error != cudaErrorNotReady) {
    note(std::string("error/") + cudaGetErrorName(error) + " in " + function, current_device());
  }
  return last_error = error;
}

uint64_t thread_id() {
  static thread_local const auto id = static_cast<uint64_t>(syscall(SYS_gettid));
  return id;
}

}  // namespace null_cuda

NULL_CUDA_API cudaError_t cudaGetLastError() {
  const cudaError_t error = null_cuda::last_error;
  null_cuda::last_error = cudaSuccess;
  return error;
}

NULL_CUDA_API cudaError_t cudaPeekAtLastError() { return null_cuda::last_error; }

NULL_CUDA_API void null_cuda_reset(void) {
  const null_cuda::Guard guard(null_cuda::lock());
  null_cuda::counters().clear();
}

NULL_CUDA_API int64_t null_cuda_count(int32_t device, const char *prefix) {
  const null_cuda::Guard guard(null_cuda::lock());
  int64_t out = 0;
  for (const auto &[owner, of] : null_cuda::counters()) {
    if (device < 0 || owner == device) out += null_cuda::sum(of, prefix);
  }
  return out;
}

NULL_CUDA_API void null_cuda_thread_counts(int64_t *launches, int64_t *waits) {
  *launches = null_cuda::launches_of_thread;
  *waits = null_cuda::waits_of_thread;
}
