// Variables of kernels: they live in memory of the device on which they are first asked for.

#include <array>
#include <map>

#include "devices.h"
#include "memory.h"
#include "record.h"
#include "settings.h"

namespace null_cuda {
namespace {

struct Variable {
  size_t size = 0;
  std::array<void *, simulated::kMostDevices> addresses = {};
};

// By the symbol of the host that stands for it.
std::map<const void *, Variable> &variables() {
  static auto *const all = new std::map<const void *, Variable>;
  return *all;
}

cudaError_t address_of(void **out, const void *symbol, const char *function) {
  const Guard guard(lock());
  const auto found = variables().find(symbol);
  if (found == variables().end()) return fail(cudaErrorInvalidSymbol, function);
  void *&address = found->second.addresses.at(static_cast<size_t>(current_device()));
  if (address == nullptr) address = take(found->second.size);
  *out = address;
  return address == nullptr ? fail(cudaErrorMemoryAllocation, function) : cudaSuccess;
}

}  // namespace
}  // namespace null_cuda

using namespace null_cuda;

NULL_CUDA_API void __cudaRegisterVar(void **, char *host, char *, const char *, int, size_t size, int, int) {
  const Guard guard(lock());
  variables()[host].size = size;
}

NULL_CUDA_API cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  return address_of(out, symbol, "cudaGetSymbolAddress");
}

NULL_CUDA_API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                                             cudaMemcpyKind kind) {
  void *address = nullptr;
  if (const cudaError_t error = address_of(&address, symbol, "cudaMemcpyToSymbol")) return error;
  return cudaMemcpy(static_cast<char *>(address) + offset, from, size, kind);
}
