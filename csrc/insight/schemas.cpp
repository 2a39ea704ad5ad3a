// What the schemas and names of operators say about their tensors.

#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>
#include <unordered_set>

#include "insight/recorder.h"

namespace tamp {
namespace {

// Whether an operator that writes to this argument ignores its former numbers.
bool overwrites(const c10::FunctionSchema &schema, const c10::Argument &argument) {
  if (argument.is_out()) return true;
  static const std::unordered_set<std::string_view> filling = {
      "aten::copy_",      "aten::fill_",   "aten::zero_",      "aten::normal_",     "aten::uniform_",
      "aten::bernoulli_", "aten::random_", "aten::geometric_", "aten::log_normal_", "aten::exponential_",
      "aten::cauchy_",    "aten::eye_",    "aten::set_",       "aten::resize_"};
  return filling.count(schema.name()) != 0;
}

}  // namespace

uint8_t use_of_input(const c10::FunctionSchema *schema, size_t index) {
  if (schema == nullptr || index >= schema->arguments().size()) return TAMP_USE_READ;
  const auto &argument = schema->arguments()[index];
  if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) return TAMP_USE_READ;
  return overwrites(*schema, argument) ? TAMP_USE_OVERWRITE : TAMP_USE_WRITE;
}

bool is_composite(const c10::OperatorHandle &op) {
  using c10::DispatchKey;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
}

bool is_uninitialized(std::string_view name) {
  return name.substr(0, 11) == "aten::empty" || name.substr(0, 15) == "aten::new_empty" || name == "aten::resize_";
}

bool is_filling(std::string_view name) {
  static const std::unordered_set<std::string_view> filling = {
      "aten::masked_fill", "aten::masked_fill_", "aten::fill_",       "aten::full",         "aten::full_like",
      "aten::where",       "aten::index_fill",   "aten::index_fill_", "aten::scalar_tensor"};
  return filling.count(name) != 0;
}

}  // namespace tamp
