#include "settings.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

namespace simulated {
namespace {

std::string text(const char *name) {
  const char *value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int64_t number(const char *name, int64_t otherwise) {
  const std::string value = text(name);
  return value.empty() ? otherwise : std::atoll(value.c_str());
}

}  // namespace

int device_count() {
  static const auto count = static_cast<int>(std::clamp<int64_t>(number("SIMULATED_CUDA_DEVICES", 2), 0, kMostDevices));
  return count;
}

size_t device_memory() {
  static const size_t bytes = static_cast<size_t>(number("SIMULATED_CUDA_MEMORY_MIB", 16384)) << 20;
  return bytes;
}

int64_t lag() {
  static const bool never = text("SIMULATED_CUDA_LAG") == "never";
  static const int64_t queries = never ? std::numeric_limits<int64_t>::max() : number("SIMULATED_CUDA_LAG", 2);
  return queries;
}

bool traces_launches() {
  static const bool traces = text("SIMULATED_CUDA_TRACE") == "1";
  return traces;
}

bool traces_syncs() {
  static const bool traces = text("SIMULATED_CUDA_TRACE") == "syncs";
  return traces;
}

bool reports() {
  static const bool reports = text("SIMULATED_CUDA_REPORT") == "1";
  return reports;
}

}  // namespace simulated
