// Values without kernels: every operator with a CUDA kernel runs libtorch's own host code, which launches kernels that
// do nothing, and then the CPU's kernel, whose results are put into the memory of the device. What the host does, and
// what it costs, is that of the real libtorch_cuda; the numbers are those of the CPU.

#include "operators.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/library.h>

#include <memory>
#include <unordered_map>

#include "../null_cuda.h"
#include "allocations.h"
#include "computation.h"
#include "model.h"
#include "semantics.h"

namespace null_cuda {
namespace {

using at::Tensor;
using c10::DispatchKey;
using torch::jit::Stack;

// libtorch's own kernels, by the names of their operators.
using Kernels = std::unordered_map<std::string, c10::SafeKernelFunction>;
template <DispatchKey Key>
Kernels &kernels() {
  static auto *const all = new Kernels;
  return *all;
}

// How many operators of this thread are running inside of each other.
thread_local int depth = 0;
struct Inside {
  Inside() { ++depth; }
  Inside(const Inside &) = delete;
  Inside &operator=(const Inside &) = delete;
  ~Inside() { --depth; }
};

// No kernel has written what host code reads to go on: it reads zeros, and its results are replaced.
class ZeroReads {
 public:
  explicit ZeroReads(bool zero) : zero_(zero && !is_on) {
    if (zero_) set(true);
  }
  ZeroReads(const ZeroReads &) = delete;
  ZeroReads &operator=(const ZeroReads &) = delete;
  ~ZeroReads() {
    if (zero_) set(false);
  }

 private:
  static void set(bool zero) {
    is_on = zero;
    null_cuda_read_zeros(zero ? 1 : 0);
  }
  static thread_local bool is_on;
  const bool zero_;
};
thread_local bool ZeroReads::is_on = false;

using Shared = std::shared_ptr<Computation>;

// Does a part of a computation on the current stream: at once, or in every replay of the graph that is captured.
template <void (Computation::*Part)()>
void enqueue(const Shared &computation, c10::Device device) {
  const c10::DeviceGuard guard(device);
  const auto run = [](void *data) { ((**static_cast<Shared *>(data)).*Part)(); };
  const auto drop = [](void *data) { delete static_cast<Shared *>(data); };
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  null_cuda_enqueue(stream.stream(), run, drop, new Shared(computation));
}

// Copies between a device and the host move the numbers themselves.
bool is_copy_with_host(const std::string &name, const Stack &stack, size_t arguments) {
  if (name != "copy_") return false;
  const auto argument = [&](size_t i) { return stack[stack.size() - arguments + i].toTensor(); };
  return !argument(0).is_cuda() || !argument(1).is_cuda();
}

// Runs libtorch's own code. Returns whether it came to its end: it may fail where it reads a number that is not there.
bool run_real(const c10::SafeKernelFunction &kernel, const c10::OperatorHandle &op, c10::DispatchKeySet keys,
              Stack &stack, const std::string &name) {
  const size_t first = stack.size() - op.schema().arguments().size();
  const Comparison comparison(op, stack, name);
  try {
    const Inside inside;
    const ZeroReads zeros(depends_on_values(name));
    kernel.callBoxed(op, keys, &stack);
  } catch (const std::exception &) {
    if (!depends_on_values(name)) throw;
    stack.resize(first);
    return false;
  }
  if (depth == 0) comparison.end();
  return true;
}

template <DispatchKey Key>
void run(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
  const auto &kernel = kernels<Key>().at(toString(op.operator_name()));
  const std::string name = simulated::name_of(op);
  watch_allocations();
  // What an operator calls is computed with it, unless the host reads it.
  const bool is_part = depth > 0 && !depends_on_values(name);
  if (is_part || is_copy_with_host(name, *stack, op.schema().arguments().size())) {
    kernel.callBoxed(op, keys, stack);
    return;
  }
  const auto computation = std::make_shared<Computation>(op, *stack);
  if (const auto device = computation->device()) enqueue<&Computation::snapshot>(computation, *device);
  const bool is_complete = run_real(kernel, op, keys, *stack, name);
  if (is_complete) computation->see_results(*stack);
  const auto device = computation->device();
  if (!device) return;
  enqueue<&Computation::compute>(computation, *device);
  if (is_complete) {
    computation->replace_results(*stack);
  } else {
    computation->push_results(*stack);
  }
  computation->forget();
}

// Attention is the composition of its parts: the fused kernels of CUDA have no twin on the CPU.
int64_t choose_composition(const Tensor &, const Tensor &, const Tensor &, const std::optional<Tensor> &, double, bool,
                           std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

// Registering says that each kernel replaces one.
struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning &) override {}
};

template <DispatchKey Key>
void replace(torch::Library &library, const c10::OperatorHandle &op) {
  kernels<Key>().emplace(toString(op.operator_name()), op.getComputedKernelForDispatchKey(Key));
  library.impl(simulated::name_of(op).c_str(), torch::CppFunction::makeFromBoxedFunction<&run<Key>>());
}

void replace_dense_kernels() {
  auto *library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto &name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || makes_no_numbers(simulated::name_of(*op))) continue;
    // These are compositions for all devices, some of whose parts the CPU lacks.
    const bool is_composed = simulated::is_one_of(simulated::name_of(*op), "convolution convolution_backward copy_");
    if (is_composed || op->hasKernelForDispatchKey(DispatchKey::CUDA)) replace<DispatchKey::CUDA>(*library, *op);
  }
}

void replace_sparse_kernels() {
  auto *library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::SparseCUDA, __FILE__, __LINE__);
  const std::pair<const char *, const char *> names[] = {{"_coalesce", ""}, {"_to_dense", ""}, {"sum", ""},
                                                         {"mul", "Tensor"}, {"add", "Tensor"}, {"isnan", ""},
                                                         {"abs", ""},       {"sqrt", ""},      {"neg", ""}};
  for (const auto &[name, overload] : names) {
    const auto op = c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, overload});
    const bool exists = op && op->hasKernelForDispatchKey(DispatchKey::SparseCUDA);
    if (exists) replace<DispatchKey::SparseCUDA>(*library, *op);
  }
}

// The real cuDNN cannot be initialized. Convolutions and recurrent layers then take libtorch's own kernels. tch has
// cuDNN order the weights of recurrent layers, for which these kernels do not ask: there is nothing to do.
Tensor keep_weights(at::TensorList, int64_t, c10::SymInt, int64_t, c10::SymInt, c10::SymInt, int64_t, bool, bool) {
  return Tensor();
}

void leave_cudnn_out() {
  at::globalContext().setUserEnabledCuDNN(false);
  auto *library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("_cudnn_rnn_flatten_weight", &keep_weights);
}

// TorchScript would compile kernels of several operators, which have no twin on the CPU.
void leave_fusion_out() {
  torch::jit::overrideCanFuseOnGPU(false);
  torch::jit::setTensorExprFuserEnabled(false);
}

// This library is linked with libtorch_cuda, which has registered its kernels by now.
const bool is_registered = [] {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  replace_dense_kernels();
  replace_sparse_kernels();
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_composition);
  leave_cudnn_out();
  leave_fusion_out();
  return true;
}();

}  // namespace

bool makes_no_numbers(const std::string &name) {
  return simulated::is_one_of(
      name,
      "empty empty_strided empty_quantized _efficientzerotensor view as_strided _reshape_alias unfold view_as_real "
      "view_as_complex resize_ set_ alias _fused_sdp_choice _local_scalar_dense record_stream is_pinned _pin_memory "
      "is_set_to _has_same_storage_numel _copy_from _copy_from_and_resize _to_dense _cudnn_init_dropout_state "
      "_use_cudnn_ctc_loss _use_cudnn_rnn_flatten_weight _cudnn_rnn_flatten_weight");
}

bool depends_on_values(const std::string &name) {
  return simulated::is_one_of(name,
                              "nonzero masked_select _unique _unique2 unique_dim bincount unique_consecutive "
                              "unique_dim_consecutive repeat_interleave equal nonzero_static _assert_async multinomial "
                              "histc _coalesce embedding_renorm_ is_nonzero index_put_ _index_put_impl_");
}

}  // namespace null_cuda
