#include "views.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_coalesced.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include "../null_cuda.h"

namespace null_cuda {
namespace {

using at::Tensor;

at::SparseTensorImpl &sparse(const Tensor &t) { return *static_cast<at::SparseTensorImpl *>(t.unsafeGetTensorImpl()); }

Tensor make_sparse(const Tensor &indices, const Tensor &values, const Tensor &like) {
  Tensor out = at::_sparse_coo_tensor_unsafe(indices, values, like.sizes());
  out._coalesced_(sparse(like).coalesced());
  return out;
}

}  // namespace

bool is_dense_cuda(const Tensor &t) { return t.defined() && t.is_cuda() && t.layout() == at::kStrided; }

Tensor view_of(const Tensor &t) {
  const auto &storage = t.storage();
  const size_t bytes = storage.nbytes();
  void *memory = bytes == 0 ? nullptr : null_cuda_host_view(storage.data(), bytes);
  c10::Storage host(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(memory, c10::Device(c10::kCPU)),
                    c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  Tensor out(c10::make_intrusive<c10::TensorImpl>(std::move(host), keys, t.dtype()));
  auto *impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  out._set_conj(t.is_conj());
  out._set_neg(t.is_neg());
  // libtorch asserts on a wrapped number that has dimensions, and so is told of none that is not.
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return out;
}

Tensor view_of_sparse(const Tensor &t) {
  return make_sparse(view_of(sparse(t).indices()), view_of(sparse(t).values()), t);
}

Tensor to_device(const Tensor &t, c10::Device device) {
  if (!t.defined()) return t;
  const c10::DeviceGuard guard(device);
  if (t.is_sparse())
    return make_sparse(to_device(sparse(t).indices(), device), to_device(sparse(t).values(), device), t);
  const Tensor out = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
  view_of(out).copy_(t);
  return out;
}

}  // namespace null_cuda
