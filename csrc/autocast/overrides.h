// Operators for which a program overrides autocast's lists inside of its regions.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>

namespace tamp {

// The number of the overrides of the calling thread; 0 if there are none.
uint32_t current_overrides() noexcept;

// Makes overrides those of the calling thread. Throws if there are none of this number.
void set_overrides(uint32_t number);

// The TAMP_RUN_… by which the calling thread overrides a call of an operator, if it does.
std::optional<uint8_t> overridden(const c10::OperatorHandle &op, c10::ArrayRef<c10::IValue> arguments);

// Gives an operator the kernel of the overrides.
void intercept(const c10::OperatorHandle &op);

// Sends the operators that have the kernel of the overrides through it on the calling thread, or ends that.
void include_kernel(bool included);

}  // namespace tamp
