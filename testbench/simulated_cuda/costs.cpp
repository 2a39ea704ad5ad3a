#include "costs.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/ForeachUtils.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace simulated {
namespace {

using at::Tensor;

const c10::IValue &argument(const Call &call, size_t index) { return call.stack.at(call.first + index); }

// The argument of that name; null if there is none.
const c10::IValue *named(const Call &call, const char *name) {
  const auto &arguments = call.schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return &argument(call, i);
  }
  return nullptr;
}

// ---- lists ----------------------------------------------------------------------------------------------------------

// The launches of libtorch's multi_tensor_apply over `depth` lists like this one: the arguments of a kernel have room
// for so many tensors, and for so many blocks of a chunk each. The numbers are MultiTensorApply.cuh's for CUDA 13.
int64_t launches_for_list(const std::vector<Tensor> &list, size_t depth) {
  constexpr int64_t kTensors[] = {770, 448, 336, 252, 210}, kBlocks = 2240, kChunk = 65536;
  const int64_t most = kTensors[std::clamp<size_t>(depth, 1, std::size(kTensors)) - 1];
  int64_t launches = 0, tensors = 0, blocks = 0;
  for (const Tensor &t : list) {
    const int64_t chunks = (t.numel() + kChunk - 1) / kChunk;
    if (chunks > 0) ++tensors;
    for (int64_t chunk = 1; chunk <= chunks; ++chunk) {
      const bool is_full = ++blocks == kBlocks || (tensors == most && chunk == chunks);
      if (!is_full) continue;
      ++launches;
      blocks = 0;
      tensors = chunk == chunks ? 0 : 1;
    }
  }
  return launches + (blocks > 0 ? 1 : 0);
}

int64_t count_with_elements(const std::vector<Tensor> &list) {
  return std::count_if(list.begin(), list.end(), [](const Tensor &t) { return t.numel() > 0; });
}

// Memory for the norms of chunks is cleared, these are computed, and joined to those of tensors. Zero is the norm of a
// tensor without elements.
int64_t norm_launches(const std::vector<Tensor> &list) {
  const int64_t some = count_with_elements(list), none = static_cast<int64_t>(list.size()) - some;
  return (some > 0 ? 1 : 0) + launches_for_list(list, 1) + 1 + none;
}

int64_t foreach_launches(const Call &call) {
  const Lists lists = lists_of(call);
  if (lists.empty()) return 0;
  const bool is_norm = is_one_of(call.name, "_foreach_norm");
  const auto &list = lists.front();
  if (!share_a_launch(call)) return is_norm ? static_cast<int64_t>(list.size()) : count_with_elements(list);
  if (is_norm) return norm_launches(list);
  const size_t results = call.schema.returns().size();
  return launches_for_list(list, lists.size() + results);
}

// The AMP kernel takes the tensors that are like the first in one launch and the others one by one.
int64_t unscale_launches(const std::vector<Tensor> &gradients) {
  std::vector<Tensor> plain, others;
  for (const Tensor &t : gradients) {
    const bool is_plain = t.scalar_type() == gradients.front().scalar_type() && t.is_non_overlapping_and_dense();
    (is_plain ? plain : others).push_back(t);
  }
  return launches_for_list(plain, 1) + count_with_elements(others);
}

bool is_fused_optimizer(const Call &call) {
  return call.name.starts_with("_fused_") && argument(call, 0).isTensorList();
}

int64_t fused_launches(const Call &call) {
  const Lists lists = lists_of(call, "state_steps");
  return lists.empty() ? 0 : launches_for_list(lists.front(), lists.size());
}

// ---- single tensors -------------------------------------------------------------------------------------------------

// Views and sizes: nothing runs on the device. A number that is read is a copy, which `waits` stands for.
bool runs_nothing(const Call &call) {
  return is_one_of(call.name,
                   "view as_strided _reshape_alias unfold view_as_real view_as_complex resize_ set_ _indices _values "
                   "indices values sparse_dim dense_dim is_coalesced _nnz _dimI _dimV alias crow_indices col_indices "
                   "_fused_sdp_choice _local_scalar_dense");
}

bool is_elementwise(const Call &call) {
  if (is_one_of(call.name, "copy_ zero_ fill_ normal_ uniform_ random_ bernoulli_")) return true;
  const auto &name = call.schema.operator_name();
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  return op && op->hasTag(at::Tag::pointwise);
}

// Kernels that take elements one by one are not launched for results without elements.
bool has_no_elements(const Call &call) {
  const auto &arguments = call.schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto &value = argument(call, i);
    const bool is_input = value.isTensor() && value.toTensor().defined() && !arguments[i].is_out();
    if (is_input && !value.toTensor().is_sparse() && value.toTensor().numel() == 0) return is_elementwise(call);
  }
  return false;
}

// Whether a reduction converts its argument to the dtype of its result first. From half precision to f32 it need not,
// unless it is a scan. Sums of integers are 64 bits wide.
bool converts(const Call &call) {
  const auto *dtype = named(call, "dtype");
  if (dtype == nullptr || !argument(call, 0).isTensor()) return false;
  const auto from = argument(call, 0).toTensor().scalar_type();
  const bool is_scan = is_one_of(call.name, "cumsum cumprod");
  if (!dtype->isInt()) return is_one_of(call.name, "sum prod") && c10::isIntegralType(from, true) && from != at::kLong;
  const auto to = static_cast<at::ScalarType>(dtype->toInt());
  const bool widens = is_half(from) && to == at::kFloat;
  return from != to && (is_scan || !widens);
}

// A vector is scanned by two kernels, and the rows of a matrix by one.
int64_t scan_launches(const Call &call) {
  return (argument(call, 0).toTensor().dim() == 1 ? 2 : 1) + (converts(call) ? 1 : 0);
}

// cuBLAS takes matrices whose rows, or columns, have their elements beside each other, and gets a copy of any other.
bool needs_copy(const Tensor &matrix) {
  if (matrix.is_non_overlapping_and_dense()) return false;
  const auto follows = [&](int64_t inner, int64_t outer) {
    return matrix.stride(inner) == 1 && matrix.stride(outer) >= std::max<int64_t>(1, matrix.size(inner));
  };
  return !follows(0, 1) && !follows(1, 0);
}

int64_t mm_launches(const Call &call) {
  const bool first = needs_copy(argument(call, 0).toTensor()), second = needs_copy(argument(call, 1).toTensor());
  return 1 + (first ? 1 : 0) + (second ? 1 : 0);
}

// cuBLASLt adds a vector to the rows of a product. Everything else is copied to the result first, unless its factor is
// zero.
int64_t addmm_launches(const Call &call) {
  const Tensor bias = argument(call, 0).toTensor(), factor = argument(call, 2).toTensor();
  const double beta = named(call, "beta")->toScalar().toDouble();
  const bool fits = bias.dim() == 1 && bias.numel() == factor.size(1);
  const bool is_added = fits && beta == 1 && factor.size(0) > 1 && factor.size(1) > 1;
  return is_added || beta == 0 ? 1 : 2;
}

// Rows are normalized by one kernel if it can load four numbers at once, and else by two.
int64_t normalization_launches(const Call &call) {
  const Tensor input = argument(call, 0).toTensor();
  const auto sizes = argument(call, 1).toDimVector();
  int64_t row = 1;
  for (const int64_t size : sizes) row *= size;
  return row % 4 == 0 && input.scalar_type() != at::kDouble ? 1 : 2;
}

// The gradient of the input, and those of weight and bias. A gradient whose elements are not one behind the other is
// copied first.
int64_t normalization_backward_launches(const Call &call) {
  const auto mask = named(call, "output_mask")->toBoolList();
  const bool is_copied = !argument(call, 0).toTensor().is_contiguous();
  return (is_copied ? 1 : 0) + (mask[0] ? 1 : 0) + (mask[1] || mask[2] ? 1 : 0);
}

// A copy of a tensor to itself, and a comparison of the same memory or of other sizes, are seen by the host.
bool is_seen_by_the_host(const Call &call) {
  if (!is_one_of(call.name, "copy_ equal")) return false;
  const Tensor &a = argument(call, 0).toTensor(), &b = argument(call, 1).toTensor();
  if (a.sizes() != b.sizes()) return call.name == "equal";
  return a.is_cuda() && b.is_cuda() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type() &&
         a.const_data_ptr() == b.const_data_ptr();
}

// A number on the CPU is copied to the device.
bool has_number_of_the_host(const Call &call) {
  if (!is_one_of(call.name, "where.self")) return false;
  const Tensor &a = argument(call, 1).toTensor(), &b = argument(call, 2).toTensor();
  return a.is_cpu() || b.is_cpu();
}

// The elements of a mask are counted, and indices on the CPU are copied.
bool has_index_that_waits(const Call &call) {
  if (!is_one_of(call.name, "index index_put_ _index_put_impl_")) return false;
  const auto indices = argument(call, 1).toListRef();
  return std::any_of(indices.begin(), indices.end(), [](const c10::IValue &value) {
    if (!value.isTensor() || !value.toTensor().defined()) return false;
    const Tensor &index = value.toTensor();
    return index.is_cpu() || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
  });
}

bool is_sparse(const Call &call, size_t index) {
  return argument(call, index).isTensor() && argument(call, index).toTensor().is_sparse();
}

// The arguments of a kernel have room for 128 tensors. Those of different dtypes are copied one by one.
int64_t cat_launches(const Call &call) {
  const auto tensors = argument(call, 0).toTensorVector();
  const auto differs = [&](const Tensor &t) { return t.scalar_type() != tensors.front().scalar_type(); };
  const int64_t count = count_with_elements(tensors);
  return std::any_of(tensors.begin(), tensors.end(), differs) ? count : (count + 127) / 128;
}

bool has_tensor(const Call &call, const char *name) {
  const auto *value = named(call, name);
  return value != nullptr && value->isTensor() && value->toTensor().defined();
}

template <int64_t Count>
int64_t always(const Call &) {
  return Count;
}

// Launches of a loss without a reduction, for the mean and for the sum.
template <int64_t None, int64_t Mean, int64_t Sum>
int64_t of_loss(const Call &call) {
  constexpr int64_t kCounts[] = {None, Mean, Sum};
  return kCounts[named(call, "reduction")->toInt()];
}

// `Count` launches, and one more for a copy if the argument's elements are not one behind the other.
template <int64_t Count, size_t Argument>
int64_t of_contiguous(const Call &call) {
  return argument(call, Argument).toTensor().is_contiguous() ? Count : Count + 1;
}

// The gradients of the gates, and `Sums` of them for biases.
template <int64_t Sums>
int64_t of_cell_backward(const Call &call) {
  return named(call, "has_bias")->toBool() ? 1 + Sums : 1;
}

int64_t abs_launches(const Call &call) { return argument(call, 0).toTensor().is_complex() ? 2 : 1; }
int64_t add_launches(const Call &call) { return is_sparse(call, 0) ? 2 : 1; }
int64_t addbmm_launches(const Call &call) { return 1 + argument(call, 1).toTensor().size(0); }
int64_t baddbmm_launches(const Call &call) { return named(call, "beta")->toScalar().toDouble() == 0 ? 1 : 2; }
int64_t group_norm_launches(const Call &call) { return has_tensor(call, "weight") ? 3 : 2; }
int64_t reduction_launches(const Call &call) { return converts(call) ? 2 : 1; }

// Channels that lie beside each other have a kernel for sums, and one for elements.
int64_t batch_norm_backward_launches(const Call &call) { return argument(call, 1).toTensor().stride(1) == 1 ? 2 : 1; }

// Operators that do not always launch one kernel, such as those that prepare a result first. A name without an overload
// stands for all that are not named.
using Launches = int64_t (*)(const Call &);
const std::unordered_map<std::string, Launches> &several() {
  static const auto *const all = new std::unordered_map<std::string, Launches>{
      {"_fused_rms_norm", normalization_launches},
      {"_softmax_backward_data", always<2>},
      {"_thnn_fused_gru_cell_backward", of_cell_backward<2>},
      {"_thnn_fused_lstm_cell_backward_impl", of_cell_backward<1>},
      {"_to_dense", always<2>},
      {"_to_sparse", always<6>},
      {"abs.out", abs_launches},
      {"add.Tensor", add_launches},
      {"addbmm", addbmm_launches},
      {"addmm", addmm_launches},
      {"addmv", always<2>},
      {"aminmax", of_contiguous<1, 0>},
      {"baddbmm", baddbmm_launches},
      {"binary_cross_entropy", of_loss<1, 3, 3>},
      {"cat", cat_launches},
      {"cumprod", scan_launches},
      {"cumsum", scan_launches},
      {"embedding_dense_backward", of_contiguous<2, 1>},
      {"equal", always<2>},
      {"huber_loss", of_loss<1, 2, 2>},
      {"linalg_vector_norm", reduction_launches},
      {"max", of_contiguous<1, 0>},
      {"max.dim", always<1>},
      {"max_pool2d_with_indices_backward", always<2>},
      {"mean", reduction_launches},
      {"min", of_contiguous<1, 0>},
      {"min.dim", always<1>},
      {"mm", mm_launches},
      {"mse_loss", of_loss<1, 2, 2>},
      {"mse_loss_backward", always<2>},
      {"multilabel_margin_loss_forward", of_loss<1, 2, 2>},
      {"nansum", reduction_launches},
      {"native_batch_norm", always<3>},
      {"native_batch_norm_backward", batch_norm_backward_launches},
      {"native_group_norm", group_norm_launches},
      {"native_layer_norm", normalization_launches},
      {"native_layer_norm_backward", normalization_backward_launches},
      {"nll_loss2d_forward", of_loss<2, 4, 3>},
      {"nll_loss_backward", of_contiguous<2, 0>},
      {"nll_loss_forward", of_loss<2, 1, 1>},
      {"norm", reduction_launches},
      {"pow.Scalar", always<2>},
      {"prod", reduction_launches},
      {"renorm", always<3>},
      {"scatter_add", always<2>},
      {"smooth_l1_loss", of_loss<1, 2, 2>},
      {"sum", reduction_launches},
      {"upsample_bicubic2d", always<2>},
      {"upsample_linear1d", always<2>},
  };
  return *all;
}

int64_t single_launches(const Call &call) {
  auto found = several().find(call.name);
  if (found == several().end()) found = several().find(call.name.substr(0, call.name.find('.')));
  return found == several().end() ? 1 : found->second(call);
}

}  // namespace

Lists lists_of(const Call &call, const char *without) {
  Lists out;
  for (size_t i = call.first; i < call.stack.size(); ++i) {
    if (!call.stack[i].isTensorList() || call.schema.arguments()[i - call.first].name() == without) continue;
    std::vector<Tensor> list = call.stack[i].toTensorVector();
    if (!list.empty()) out.push_back(std::move(list));
  }
  return out;
}

bool are_alike(const Lists &lists, bool skip_dtypes_across) {
  const std::vector<at::TensorList> views(lists.begin(), lists.end());
  return at::native::_check_tensors_share_device_and_dtype(views, skip_dtypes_across) &&
         at::native::_check_tensors_share_sizes_and_strides(views);
}

// can_use_fast_route, and what its callers add.
bool share_a_launch(const Call &call) {
  const Lists lists = lists_of(call);
  for (const auto &list : lists) {
    if (list.size() != lists.front().size()) return false;
  }
  if (is_one_of(call.name, "_foreach_copy_")) return are_alike(lists, /*skip_dtypes_across=*/true);
  for (size_t i = call.first; i < call.stack.size(); ++i) {
    if (!call.stack[i].isTensor() || !call.stack[i].toTensor().defined()) continue;
    const Tensor &number = call.stack[i].toTensor();
    if (number.is_cuda() && number.scalar_type() != lists.front().front().scalar_type()) return false;
  }
  return are_alike(lists);
}

bool waits(const Call &call) {
  if (is_seen_by_the_host(call)) return false;
  if (has_index_that_waits(call) || has_number_of_the_host(call)) return true;
  // These read their value on the host.
  if (is_one_of(call.name, "masked_fill_.Tensor index_fill_.int_Tensor")) {
    return call.stack.back().toTensor().is_cuda();
  }
  return is_one_of(call.name,
                   "_local_scalar_dense is_nonzero equal nonzero masked_select _unique _unique2 unique_dim "
                   "unique_consecutive unique_dim_consecutive bincount histc repeat_interleave _coalesce _to_sparse");
}

int64_t launches(const Call &call) {
  if (runs_nothing(call)) return 0;
  if (is_one_of(call.name, "_amp_foreach_non_finite_check_and_unscale_")) {
    return unscale_launches(argument(call, 0).toTensorVector());
  }
  if (call.name.starts_with("_foreach_")) return foreach_launches(call);
  if (is_fused_optimizer(call)) return fused_launches(call);
  if (is_seen_by_the_host(call) || has_no_elements(call)) return 0;
  return single_launches(call);
}

}  // namespace simulated
