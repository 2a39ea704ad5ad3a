// Comparing the results of one run with those of another.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "insight/shim_insight.h"

namespace tamp {

// What the operators that a program called in a forward pass returned, in their order.
struct Reference {
  struct Result {
    std::string name;
    std::vector<at::Tensor> numbers;
    bool lower = false;  // whether a later run returned it in half precision
  };
  std::vector<Result> results;
};

// How a recording compares its results.
struct Comparison {
  std::shared_ptr<Reference> reference;
  uint8_t how = TAMP_RECORD_REFERENCE;
  at::ScalarType dtype = at::kFloat;
  size_t place = 0;
  bool differs = false;
  // The nodes that were made within the operator that the program called, by thread and sequence number, and whether its
  // results are rounded.
  std::vector<std::pair<uint64_t, int64_t>> pending;
  std::map<std::pair<uint64_t, int64_t>, bool> rounded;

  // Keeps, compares or rounds what an operator of the forward pass returned. If it has drawn random numbers, they become
  // those of the reference, because other dtypes draw others.
  void forward(const std::string &name, const std::vector<at::Tensor> &results, bool drawn, tamp_recorded_event &event);
  // Rounds what an operator of a backward node returned.
  void backward(std::pair<uint64_t, int64_t> node, const std::vector<at::Tensor> &results) const;
};

}  // namespace tamp

struct tamp_reference {
  std::shared_ptr<tamp::Reference> reference = std::make_shared<tamp::Reference>();
};
