// What operators cost, beside what the simulated GPUs say that they cost.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>
#include <utility>

namespace null_cuda {

struct Costs {
  int64_t launches, waits;
};

// Compares one call: what the simulation expects of it before, and what the thread has done after.
class Comparison {
 public:
  Comparison(const c10::OperatorHandle &op, torch::jit::Stack &stack, const std::string &name);
  void end() const;

 private:
  const std::string &name_;
  bool is_compared_ = false;
  Costs expected_, before_;
  std::string example_;
};

}  // namespace null_cuda
