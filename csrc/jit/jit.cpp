// TorchScript: its own autocast pass, and freezing.

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/passes/autocast.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstring>
#include <sstream>
#include <string>

#include "border/guarded.h"

extern "C" {

uint8_t tamp_jit_set_autocast_mode(uint8_t enabled, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t { return torch::jit::setAutocastMode(enabled != 0) ? 1 : 0; });
}

tamp_tensor *tamp_jit_freeze(const uint8_t *file, size_t count, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_tensor * {
    std::istringstream in(std::string(reinterpret_cast<const char *>(file), count));
    std::ostringstream out;
    torch::jit::freeze(torch::jit::load(in)).save(out);
    const std::string frozen = out.str();
    const at::Tensor bytes = at::empty({static_cast<int64_t>(frozen.size())}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), frozen.data(), frozen.size());
    return tamp::give(bytes);
  });
}

}  // extern "C"
