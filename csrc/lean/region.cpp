#include "lean/region.h"

#include <ATen/autocast_mode.h>

#include "autocast/overrides.h"
#include "border/guarded.h"

namespace tamp {
namespace {

// The first tensor of a call, which every operator here has.
const at::Tensor &first_tensor(c10::ArrayRef<c10::IValue> arguments) { return arguments[0].toTensor(); }

}  // namespace

std::optional<at::ScalarType> cast_of(const c10::OperatorHandle &op, c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor &first = first_tensor(arguments);
  const auto device = first.device().type();
  const bool is_cast = first.scalar_type() != at::kDouble && at::autocast::is_autocast_available(device) &&
                       at::autocast::is_autocast_enabled(device);
  if (!is_cast) return std::nullopt;
  const auto half = at::autocast::get_autocast_dtype(device);
  if (const auto run_as = overridden(op, arguments)) return *run_as == TAMP_RUN_F32 ? at::kFloat : half;
  if (!op.hasKernelForDispatchKey(at::autocast::get_autocast_dispatch_key_from_device_type(device)))
    return std::nullopt;
  return op.operator_name().name == "aten::linear" ? half : at::kFloat;
}

std::optional<at::ScalarType> cast_of_linear(const at::Tensor &xs, const at::Tensor &weight, const at::Tensor &bias) {
  static const auto linear = c10::Dispatcher::singleton().findSchemaOrThrow("aten::linear", "");
  const c10::IValue arguments[] = {xs, weight, bias.defined() ? c10::IValue(bias) : c10::IValue()};
  return cast_of(linear, arguments);
}

at::Tensor cast_in_region(const at::Tensor &t, std::optional<at::ScalarType> dtype) {
  if (!dtype || !t.defined() || t.scalar_type() == *dtype) return t;
  return at::autocast::cached_cast(*dtype, t, t.device().type());
}

bool is_emulated() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return !((local.included_ & kEmulation) - local.excluded_).empty();
}

}  // namespace tamp
