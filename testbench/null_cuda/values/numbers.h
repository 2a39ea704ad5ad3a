// Random numbers: the CPU's, from the seeds and offsets of the devices' generators.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <optional>

namespace null_cuda {

// The numbers that one call of an operator draws. In a graph each replay draws others, from the seed and offset that
// the prologue of the graph has written to the memory of the device.
class Numbers {
 public:
  // Of a generator of the device, or of the device's default one. Its offset is the one before the call.
  Numbers(const std::optional<at::Generator> &generator, c10::Device device);

  const at::Generator &generator() const { return generator_; }

  // Before the call is computed.
  void begin();

 private:
  at::Generator generator_;
  at::TensorBase seed_, offset_;  // in a capture only
  uint64_t in_graph_ = 0;
};

// Gives the numbers of a generator to the CPU's default one, from which some kernels draw, and takes them back.
class DefaultNumbers {
 public:
  explicit DefaultNumbers(const std::optional<at::Generator> &generator);
  DefaultNumbers(const DefaultNumbers &) = delete;
  DefaultNumbers &operator=(const DefaultNumbers &) = delete;
  ~DefaultNumbers();

 private:
  at::TensorBase kept_;
};

}  // namespace null_cuda
