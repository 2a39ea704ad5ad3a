// In which dtypes the regions of the calling thread would run an operator in whose place this crate computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace tamp {

// Returns the dtype to which the regions cast the floating-point arguments of a call, or nothing if they leave them
// alone. They cast because of an override of the program, or because the operator is on one of autocast's lists.
// Callers ask only for `linear`, which is on the list for half precision, and for operators that are on the list for
// f32 or on none. f64 is never cast.
std::optional<at::ScalarType> cast_of(const c10::OperatorHandle &op, c10::ArrayRef<c10::IValue> arguments);

// The same for a linear layer. An undefined `bias` stands for none.
std::optional<at::ScalarType> cast_of_linear(const at::Tensor &xs, const at::Tensor &weight, const at::Tensor &bias);

// Casts a tensor as autocast does: through the cache of weights, and with a derivative. An undefined tensor stays
// undefined.
at::Tensor cast_in_region(const at::Tensor &t, std::optional<at::ScalarType> dtype);

// Whether the thread emulates half precision. The emulation works on libtorch's operators, so the caller must call
// these.
bool is_emulated();

}  // namespace tamp
