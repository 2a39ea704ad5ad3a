// One call of an operator, as the CPU computes it on the memory of the devices.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"

namespace null_cuda {

// What has to be computed is known before and after the call of libtorch's own code, and is computed once, or once in
// every replay of a graph.
class Computation {
 public:
  using Stack = torch::jit::Stack;

  // Replaces the device tensors among the arguments, which are the stack's last, by views of the CPU.
  Computation(const c10::OperatorHandle &op, const Stack &stack);

  const std::string &name() const { return name_; }

  // The device on which the call runs, if a tensor or an argument names one.
  std::optional<c10::Device> device() const { return device_; }

  // Notes where the results of libtorch's call are, which are the stack's last.
  void see_results(const Stack &stack);

  // Copies what the operator writes to, before libtorch's own code may write there.
  void snapshot();

  // Runs the CPU's kernel, and writes its results to the memory of the devices.
  void compute();

  // Replaces results on the stack that have other sizes than those of the CPU's kernel, or that are no tensors.
  void replace_results(Stack &stack);

  // Puts the CPU's results on the stack, in the place of those that libtorch's own code could not make.
  void push_results(Stack &stack);

  // Lets go of what belongs to the caller. A graph may keep the rest.
  void forget();

 private:
  struct Written {
    at::Tensor given;   // by the caller
    at::Tensor before;  // over its memory, as it was
    at::Tensor copy;    // what the kernel writes to
    at::Tensor after;   // over its memory, after the call
  };
  struct Fresh {
    size_t result;
    std::optional<size_t> index;  // in a list
    at::Tensor memory;
  };

  void prepare_written(const c10::IValue &value);
  at::Tensor host(const at::Tensor &t);
  c10::IValue host_argument(const c10::IValue &value, const c10::Argument &argument);
  at::Generator numbers(const std::optional<at::Generator> &generator);
  bool is_given(const at::Tensor &t) const;
  void see(const at::Tensor &t, size_t result, std::optional<size_t> index);
  Stack run(Stack stack) const;
  Stack run_in_f32() const;
  bool has_half_numbers() const;
  void write(const Stack &results);
  c10::IValue replaced(const c10::IValue &real, const c10::IValue &computed) const;

  const c10::OperatorHandle op_;
  const std::string name_;
  std::optional<c10::Device> device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> hosts_;  // tensors of devices and what stands for them
  std::vector<c10::IValue> arguments_;
  std::vector<Written> written_;
  std::vector<Fresh> fresh_;
  std::list<Numbers> numbers_;
  std::optional<at::Generator> default_numbers_;
  Stack results_;  // empty if it could not be computed
};

}  // namespace null_cuda
