// Averaging of gradients over ranks: what torch/nn/parallel/distributed.py does around c10d::Reducer.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>
#include <utility>

#include "distributed/agreement.h"
#include "optim/masters.h"

namespace {

// A pointer to the node of a graph that accumulates a gradient.
using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor &>()));

// How often each parameter has received a gradient since the backward pass began.
using Counts = std::vector<std::atomic<uint32_t>>;

// Counts a gradient when it has been accumulated.
class CountGradients : public torch::autograd::FunctionPostHook {
 public:
  CountGradients(std::shared_ptr<Counts> counts, size_t index) : counts_(std::move(counts)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list &outputs,
                                            const torch::autograd::variable_list & /*inputs*/) override {
    (*counts_)[index_].fetch_add(1, std::memory_order_relaxed);
    return outputs;
  }

 private:
  std::shared_ptr<Counts> counts_;
  size_t index_;
};

}  // namespace

struct tamp_reducer {
  c10::intrusive_ptr<tamp::distributed::Group> group;
  std::vector<at::Tensor> parameters;
  std::vector<at::ScalarType> dtypes;
  std::vector<std::vector<int64_t>> sizes;
  bool finds_unused = false;
  std::vector<size_t> narrowed;  // the parameters whose gradients were f32 before the backward pass
  std::shared_ptr<Counts> counts;
  std::vector<std::pair<Accumulator, uintptr_t>> hooks;  // those that count
  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;

  tamp_reducer() = default;
  tamp_reducer(const tamp_reducer &) = delete;
  tamp_reducer &operator=(const tamp_reducer &) = delete;

  ~tamp_reducer() {
    for (const auto &[node, key] : hooks) node->del_post_hook(key);
  }
};

namespace {

using tamp::distributed::given;
using Ranks = c10::intrusive_ptr<c10d::ProcessGroup>;

// As in torch/nn/parallel/distributed.py.
constexpr size_t kBroadcastBytes = size_t{250} << 20;

// Communicates a bucket in half precision, like fp16_compress_hook and bf16_compress_hook of Python's default_hooks.
class Compression : public c10d::CppCommHookInterface<Ranks> {
 public:
  Compression(const Ranks &group, at::ScalarType dtype, bool divide_first)
      : CppCommHookInterface<Ranks>(group), dtype_(dtype), divide_first_(divide_first) {}

  // Called by a backward pass, which is in the regions of the program.
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket &bucket) override {
    const tamp::OutsideRegions own;
    const at::Tensor &buffer = bucket.getBufferRef();
    const int64_t ranks = state_->getSize();
    // Dividing first keeps what half precision cannot hold before the division.
    std::vector<at::Tensor> small{divide_first_ ? buffer.div_(ranks).to(dtype_) : buffer.to(dtype_).div_(ranks)};
    return state_->allreduce(small)->getFuture()->then(
        [buffer](c10::ivalue::Future &done) {
          const tamp::OutsideRegions own;
          const c10::IValue value = done.value();
          buffer.copy_(value.isTensorList() ? value.toTensorVector()[0] : value.toTensor());
          return c10::IValue(buffer);
        },
        c10::TensorType::get());
  }

 private:
  at::ScalarType dtype_;
  bool divide_first_;
};

// Owns an object whose destructor may throw, which nothing could handle.
template <typename T>
std::shared_ptr<T> owned(T *object) {
  return std::shared_ptr<T>(object, [](T *last) {
    try {
      delete last;
    } catch (const std::exception &) {
    }
  });
}

std::vector<at::Tensor> list(tamp_tensor *const *tensors, size_t count) {
  std::vector<at::Tensor> out;
  out.reserve(count);
  for (size_t i = 0; i < count; ++i) out.push_back(tamp::tensor(tensors[i]));
  return out;
}

// Divides the parameters into buckets, the last ones first, because backward computes their gradients first. Unless
// unused parameters are looked for, all are in one bucket until the first backward has shown the order.
std::vector<std::vector<size_t>> buckets(const std::vector<at::Tensor> &parameters, int64_t first, int64_t others,
                                         bool finds_unused) {
  std::vector<size_t> limits{static_cast<size_t>(others)};
  if (!finds_unused) {
    limits = {static_cast<size_t>(std::numeric_limits<int64_t>::max())};
  } else if (first < others) {
    limits.insert(limits.begin(), static_cast<size_t>(first));
  }
  const std::vector<bool> sparse(parameters.size(), false);
  auto indices = std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, limits, sparse));
  std::reverse(indices.begin(), indices.end());
  return indices;
}

// Converts the gradient of a parameter, and has autograd accumulate it in this dtype.
void convert_gradient(const at::Tensor &parameter, at::ScalarType dtype) {
  const at::Tensor &gradient = parameter.grad();
  tamp::replace_gradient(parameter, dtype, gradient.defined() ? gradient.detach().to(dtype) : at::Tensor());
}

// Makes autograd accumulate gradients in their parameters' dtypes, which are those of the buckets. An optimizer with
// master weights has made them f32.
void narrow(tamp_reducer &r) {
  for (size_t i = 0; i < r.parameters.size(); ++i) {
    const at::ScalarType dtype = r.parameters[i].scalar_type();
    if ((dtype != at::kBFloat16 && dtype != at::kHalf) || r.parameters[i].grad_dtype() == dtype) continue;
    convert_gradient(r.parameters[i], dtype);
    r.narrowed.push_back(i);
  }
}

// Makes these gradients f32 again.
void widen(tamp_reducer &r) {
  for (const size_t i : std::exchange(r.narrowed, {})) convert_gradient(r.parameters[i], at::kFloat);
}

void count_gradients(tamp_reducer &r) {
  r.counts = std::make_shared<Counts>(r.parameters.size());
  r.hooks.reserve(r.parameters.size());
  for (size_t i = 0; i < r.parameters.size(); ++i) {
    auto node = torch::autograd::impl::grad_accumulator(r.parameters[i]);
    const uintptr_t key = node->add_post_hook(std::make_unique<CountGradients>(r.counts, i));
    r.hooks.emplace_back(std::move(node), key);
  }
}

void compress(c10d::Reducer &reducer, const Ranks &group, const tamp_reducer_options &o) {
  if (o.compression == TAMP_COMPRESS_NONE) return;
  const auto dtype = o.compression == TAMP_COMPRESS_FP16 ? at::kHalf : at::kBFloat16;
  reducer.register_comm_hook(std::make_unique<Compression>(group, dtype, o.divide_first != 0));
}

}  // namespace

extern "C" {

tamp_reducer *tamp_reducer_new(const tamp_group *group, tamp_tensor *const *parameters, const char *const *names,
                               size_t count, const tamp_reducer_options *options, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_reducer * {
    // As Python does when it imports c10d; messages then name parameters if TORCH_DISTRIBUTED_DEBUG says so.
    static std::once_flag once;
    std::call_once(once, c10d::setDebugLevelFromEnvironment);
    const Ranks ranks = given(group).group;
    auto out = std::make_unique<tamp_reducer>();
    out->group = given(group).group;
    out->parameters = list(parameters, count);
    out->finds_unused = options->find_unused_parameters != 0;
    std::unordered_map<size_t, std::string> named;
    for (size_t i = 0; i < count; ++i) {
      out->dtypes.push_back(out->parameters[i].scalar_type());
      out->sizes.push_back(out->parameters[i].sizes().vec());
      named.emplace(i, names[i]);
    }
    const bool by_default = options->bucket_bytes == 0;
    const int64_t others = by_default ? c10d::kDefaultBucketBytesCap : options->bucket_bytes;
    const int64_t first = by_default ? c10d::kDefaultFirstBucketBytes : options->bucket_bytes;
    out->reducer = owned(new c10d::Reducer(out->parameters, buckets(out->parameters, first, others, out->finds_unused),
                                           ranks, std::vector<bool>(count, false), others, out->finds_unused,
                                           options->gradient_as_bucket_view != 0, std::move(named), first,
                                           /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
                                           /*bucket_bytes_cap_list=*/std::vector<int64_t>{}));
    count_gradients(*out);
    out->logger = owned(new c10d::Logger(out->reducer));
    out->reducer->set_logger(out->logger);
    out->logger->set_construction_data_and_log("VarStore", {}, -1, false, false, false);
    compress(*out->reducer, ranks, *options);
    return out.release();
  });
}

void tamp_reducer_free(tamp_reducer *reducer) noexcept { delete reducer; }

uint8_t tamp_reducer_parameters(const tamp_reducer *reducer, size_t *index, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    const tamp_reducer &r = given(reducer);
    for (size_t i = 0; i < r.parameters.size(); ++i) {
      const at::Tensor &parameter = r.parameters[i];
      *index = i;
      if (parameter.scalar_type() != r.dtypes[i]) return TAMP_PARAMETERS_CAST;
      if (!parameter.requires_grad()) return TAMP_PARAMETERS_FROZEN;
      if (parameter.sizes() != r.sizes[i]) return TAMP_PARAMETERS_RESHAPED;
    }
    return TAMP_PARAMETERS_SAME;
  });
}

uint8_t tamp_reducer_may_rebuild(const tamp_reducer *reducer, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    return at::GradMode::is_enabled() && given(reducer).reducer->should_rebuild_buckets() ? 1 : 0;
  });
}

uint8_t tamp_reducer_before_forward(tamp_reducer *reducer, uint8_t sync, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    tamp_reducer &r = given(reducer);
    if (!at::GradMode::is_enabled()) return 0;
    r.group->depend_on(nullptr);
    if (sync != 0) {
      r.reducer->prepare_for_forward();
    }
    r.reducer->rebuild_buckets();
    if (sync != 0 && !r.finds_unused) {
      narrow(r);
      r.reducer->prepare_for_backward({});
    }
    return 1;
  });
}

uint8_t tamp_reducer_can_undo(const tamp_reducer *reducer, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    const tamp_reducer &r = given(reducer);
    const auto has_gradient = [](const at::Tensor &parameter) { return tamp::gradient(parameter).defined(); };
    if (std::any_of(r.parameters.begin(), r.parameters.end(), has_gradient)) return 0;
    // The first pass finds the order of the buckets, which all ranks have to find in the same one.
    return r.reducer->should_rebuild_buckets() ? 0 : 1;
  });
}

void tamp_reducer_before_backward(tamp_reducer *reducer, const tamp_tensor *loss, const tamp_gathering *agreement,
                                  char **err) noexcept {
  tamp::guarded(err, [&] {
    tamp_reducer &r = given(reducer);
    r.group->depend_on(agreement != nullptr ? agreement->gathering : nullptr);
    // If this is the second backward pass since the forward pass, the reducer would count the parameters of both.
    r.reducer->rebuild_buckets();
    narrow(r);
    for (auto &count : *r.counts) count.store(0, std::memory_order_relaxed);
    std::vector<at::Tensor> roots;
    if (r.finds_unused) roots.push_back(tamp::tensor(loss));
    r.reducer->prepare_for_backward(roots);
  });
}

void tamp_reducer_after_backward(tamp_reducer *reducer, char **err) noexcept {
  tamp::guarded(err, [&] {
    tamp_reducer &r = given(reducer);
    // A plain backward pass may follow, which no comparison precedes.
    r.group->depend_on(nullptr);
    std::exception_ptr unfinished;
    try {
      r.reducer->check_finalized();
    } catch (...) {
      unfinished = std::current_exception();
    }
    widen(r);
    if (unfinished != nullptr) std::rethrow_exception(unfinished);
  });
}

int64_t tamp_reducer_repeated(const tamp_reducer *reducer, char **err) noexcept {
  return tamp::guarded(err, [&]() -> int64_t {
    const Counts &counts = *given(reducer).counts;
    const auto repeated =
        std::find_if(counts.begin(), counts.end(), [](const auto &count) { return count.load() > 1; });
    return repeated == counts.end() ? -1 : repeated - counts.begin();
  });
}

void tamp_group_broadcast_all(const tamp_group *group, tamp_tensor *const *tensors, size_t count, int64_t root,
                              char **err) noexcept {
  tamp::guarded(err, [&] {
    std::vector<at::Tensor> plain;
    for (const at::Tensor &t : list(tensors, count)) plain.push_back(t.detach());
    c10d::broadcast_coalesced(given(group).group, plain, kBroadcastBytes, static_cast<int>(root));
  });
}

}  // extern "C"
