// Passes over batches that average running statistics over the calls of each layer. libtorch's batch normalization takes
// its momentum as an argument, which the kernel of overrides.cpp replaces.

#include "autocast/statistics.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autocast/overrides.h"
#include "border/guarded.h"

// A pass and the statistics that its layers write to.
struct tamp_statistics {
  struct Buffer {
    at::Tensor running;  // keeps its storage alive, by which it is found
    at::Tensor own;      // the model's own numbers
    double initial;      // what a layer begins with
    int64_t calls = TAMP_STATISTICS_NEVER_MET;
  };
  std::vector<Buffer> buffers;
  std::unordered_map<const c10::StorageImpl *, size_t> places;
  tamp_statistics *outer = nullptr;
};

namespace tamp {
namespace {

using c10::IValue;
using Buffer = tamp_statistics::Buffer;

thread_local tamp_statistics *innermost = nullptr;
// Whether a counted normalization runs, which calls others to do its work.
thread_local bool is_in_call = false;

// The statistic that a tensor is, under whatever handle. A part of one is none.
Buffer *find(const at::Tensor &t) {
  if (!t.defined() || !t.has_storage()) return nullptr;
  for (auto *pass = innermost; pass != nullptr; pass = pass->outer) {
    const auto found = pass->places.find(t.storage().unsafeGetStorageImpl());
    if (found == pass->places.end()) continue;
    Buffer &buffer = pass->buffers[found->second];
    return buffer.running.numel() == t.numel() ? &buffer : nullptr;
  }
  return nullptr;
}

// At the first call of a layer its statistics are as those of a new layer, or, if it keeps them, the model's own.
void meet(Buffer &buffer, bool keeps) {
  if (buffer.calls != TAMP_STATISTICS_NEVER_MET) return;
  const OutsideRegions own;
  const c10::NoGradGuard no_grad;
  if (keeps) {
    buffer.running.copy_(buffer.own);
  } else {
    buffer.running.fill_(buffer.initial);
  }
  buffer.calls = keeps ? TAMP_STATISTICS_KEPT : 0;
}

// Counts a call of a layer. Returns its momentum, if it is to have another one.
std::optional<double> count(Buffer *mean, Buffer *variance, bool trains, bool keeps) {
  std::optional<double> momentum;
  for (Buffer *buffer : {variance, mean}) {
    if (buffer == nullptr) continue;
    meet(*buffer, keeps);
    if (trains && buffer->calls != TAMP_STATISTICS_KEPT) momentum = 1.0 / static_cast<double>(++buffer->calls);
  }
  return momentum;
}

// Gives all operators that write running statistics the kernel that counts their calls.
void intercept_normalizations() {
  auto &operators = c10::Dispatcher::singleton();
  for (const c10::OperatorName &name : operators.getAllOpNames()) {
    const auto op = operators.findSchema(name);
    if (op && normalizes(name.name, op->schema())) intercept(*op);
  }
}

}  // namespace

bool is_statistic(const c10::Argument &argument) {
  const std::string &name = argument.name();
  return name == "running_mean" || name == "running_var";
}

bool normalizes(const std::string &name, const c10::FunctionSchema &schema) {
  for (const std::string_view reading : {"_backward", "_no_training", "_no_update", "_functional"}) {
    if (name.size() >= reading.size() && name.substr(name.size() - reading.size()) == reading) return false;
  }
  const auto &arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), is_statistic);
}

bool is_evaluated(const c10::FunctionSchema &schema, c10::ArrayRef<IValue> values) {
  for (const char *name : {"training", "use_input_stats"}) {
    const auto index = schema.argumentIndexWithName(name);
    if (index && values[static_cast<size_t>(*index)].isBool()) return !values[static_cast<size_t>(*index)].toBool();
  }
  return false;
}

bool averages_statistics() noexcept { return innermost != nullptr; }

CountedCall::CountedCall(const c10::OperatorHandle &op, IValue *arguments) {
  if (innermost == nullptr || is_in_call || !normalizes(op.operator_name().name, op.schema())) {
    return;
  }
  const auto &schema = op.schema();
  const auto argument = [&](const char *name) -> IValue * {
    const auto index = schema.argumentIndexWithName(name);
    return index ? arguments + *index : nullptr;
  };
  const auto statistic = [&](const char *name) {
    const IValue *value = argument(name);
    return value != nullptr && value->isTensor() ? find(value->toTensor()) : nullptr;
  };
  Buffer *const mean = statistic("running_mean"), *const variance = statistic("running_var");
  if (mean == nullptr && variance == nullptr) return;
  const bool trains = !is_evaluated(schema, c10::ArrayRef<IValue>(arguments, schema.arguments().size()));
  // update_bn does not change the momentum of instance normalization, nor what it has computed so far.
  const bool is_of_instances = argument("use_input_stats") != nullptr;
  const auto momentum = count(mean, variance, trains, is_of_instances);
  if (IValue *const of_layer = argument("momentum"); momentum && of_layer != nullptr) *of_layer = *momentum;
  is_counted_ = is_in_call = true;
}

CountedCall::~CountedCall() {
  if (is_counted_) is_in_call = false;
}

}  // namespace tamp

extern "C" {

tamp_statistics *tamp_statistics_begin(tamp_tensor *const *running, tamp_tensor *const *own, const uint8_t *variances,
                                       size_t count, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_statistics * {
    auto pass = std::make_unique<tamp_statistics>();
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor &buffer = tamp::tensor(running[i]);
      pass->places.emplace(buffer.storage().unsafeGetStorageImpl(), i);
      pass->buffers.push_back({buffer, tamp::tensor(own[i]), variances[i] != 0 ? 1.0 : 0.0});
    }
    tamp::intercept_normalizations();
    tamp::include_kernel(true);
    pass->outer = std::exchange(tamp::innermost, pass.get());
    return pass.release();
  });
}

int64_t tamp_statistics_calls(const tamp_statistics *pass, size_t index) noexcept { return pass->buffers[index].calls; }

void tamp_statistics_end(tamp_statistics *pass) noexcept {
  const std::unique_ptr<tamp_statistics> ended(pass);
  tamp::innermost = pass->outer;
  if (tamp::innermost == nullptr) tamp::include_kernel(tamp::current_overrides() != 0);
}

double tamp_statistics_momentum(const tamp_tensor *mean, const tamp_tensor *variance, uint8_t trains, double momentum,
                                char **err) noexcept {
  return tamp::guarded(err, [&] {
    tamp_statistics::Buffer *const of_mean = tamp::find(tamp::tensor(mean));
    return tamp::count(of_mean, tamp::find(tamp::tensor(variance)), trains != 0, false).value_or(momentum);
  });
}

}  // extern "C"
