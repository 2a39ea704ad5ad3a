// Running statistics of normalizations: which operators write them, and passes over batches that average them over the
// calls of each layer.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <string>

namespace tamp {

// Whether an argument is a running statistic. The schemas of the normalizations do not say that these are written.
bool is_statistic(const c10::Argument &argument);

// Whether an operator writes running statistics without saying so in its schema. Some say by their names that they only
// read them.
bool normalizes(const std::string &name, const c10::FunctionSchema &schema);

// Whether a normalization leaves its statistics as they are. Some have no argument that tells.
bool is_evaluated(const c10::FunctionSchema &schema, c10::ArrayRef<c10::IValue> values);

// Whether a pass of the calling thread averages statistics.
bool averages_statistics() noexcept;

// An operator that runs. If it is a batch normalization with statistics of a pass, its momentum becomes the one with
// which they are the mean of all calls so far, as in torch.optim.swa_utils.update_bn.
class CountedCall {
 public:
  CountedCall(const c10::OperatorHandle &op, c10::IValue *arguments);
  CountedCall(const CountedCall &) = delete;
  CountedCall &operator=(const CountedCall &) = delete;
  ~CountedCall();

 private:
  bool is_counted_ = false;
};

}  // namespace tamp
