// Where CUDA's kernels do something else than those of the CPU: what they take, and how they compute.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace simulated {

// A call of an operator whose arguments, from `first` on, are the stack's last.
struct Call {
  const c10::FunctionSchema &schema;
  const std::string &name;  // without its namespace, such as add.Tensor
  torch::jit::Stack &stack;
  size_t first;
};

bool is_half(at::ScalarType dtype);

// The name of an operator without its namespace.
std::string name_of(const c10::OperatorHandle &op);

// Calls `f` with the tensors of an argument.
template <typename F>
void for_each_tensor(const c10::IValue &value, const F &f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor &t : value.toTensorVector()) f(t);
  } else if (value.isList()) {
    for (const c10::IValue &each : value.toListRef()) {
      if (each.isTensor()) f(each.toTensor());
    }
  }
}

// Whether an argument of this type is a tensor or a list of tensors, some of which may be missing.
inline bool has_tensors(const c10::IValue &value, const std::string &type) {
  const bool is_optional_list = value.isList() && type.find("Tensor?") != std::string::npos;
  return value.isTensor() || value.isTensorList() || is_optional_list;
}

// The same with `f` of each tensor.
template <typename F>
c10::IValue map_tensors(const c10::IValue &value, const F &f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor &t : value.toTensorVector()) list.push_back(f(t));
    return list;
  }
  c10::List<std::optional<at::Tensor>> list;
  for (const c10::IValue &each : value.toListRef()) {
    list.push_back(each.isTensor() ? std::make_optional(f(each.toTensor())) : std::nullopt);
  }
  return list;
}

// Whether `name`, which may have an overload, is one of the operators, which are separated by spaces.
bool is_one_of(std::string_view name, std::string_view operators);

// Changes the versions of the tensors that an operator on lists writes to, as its host code does.
void change_versions(const Call &call);

// Refuses dtypes and layouts that PyTorch's kernel refuses.
void check(const Call &call);

// Runs the operator with arguments on the CPU, in the way of CUDA's kernel. `run` calls the kernel of the CPU.
template <typename F>
void compute(const Call &call, const F &run);

// What `compute` is made of.
bool compute_alone(const Call &call);
struct Adapted {
  std::vector<std::pair<at::Tensor, at::Tensor>> write_back;  // to, from
  std::optional<at::ScalarType> result;
};
Adapted adapt(const Call &call);
void finish(const Call &call, const Adapted &adapted);

template <typename F>
void compute(const Call &call, const F &run) {
  if (compute_alone(call)) return;
  const Adapted adapted = adapt(call);
  run();
  finish(call, adapted);
}

}  // namespace simulated
