#include "mirror.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_coalesced.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "memory.h"

namespace simulated {
namespace {

using at::Tensor;

void copy_shape(const Tensor &from, const Tensor &to) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

Tensor over(c10::Storage storage, c10::DispatchKey key, const Tensor &like) {
  Tensor out(c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype()));
  copy_shape(like, out);
  out._set_conj(like.is_conj());
  out._set_neg(like.is_neg());
  return out;
}

// A copy of memory that an operator made on the host.
c10::Storage to_device(const c10::Storage &host, c10::Device device) {
  const c10::DeviceGuard guard(device);
  c10::DataPtr data = device_allocator().allocate(host.nbytes());
  if (host.nbytes() != 0) memcpy(host_address(data.get()), host.data(), host.nbytes());
  return {c10::Storage::use_byte_size_t(), host.nbytes(), std::move(data), &device_allocator(), /*resizable=*/true};
}

at::SparseTensorImpl &sparse_impl(const Tensor &t) {
  return *static_cast<at::SparseTensorImpl *>(t.unsafeGetTensorImpl());
}

}  // namespace

Tensor Mirror::host(const Tensor &t) {
  if (t.is_sparse()) return host_of_sparse(t);
  for (const auto &pair : dense_) {
    if (pair.device.is_same(t)) return pair.host;
  }
  TORCH_CHECK(t.layout() == at::kStrided, "the simulated devices have no tensors of layout ", t.layout());
  Tensor out = over(host_storage(t.storage()), c10::DispatchKey::CPU, t);
  // libtorch asserts on a wrapped number that has dimensions, and so is told of none that is not.
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  dense_.push_back({t, out, out.storage().data()});
  return out;
}

Tensor Mirror::host_of_sparse(const Tensor &t) {
  const auto &impl = sparse_impl(t);
  Tensor out = at::_sparse_coo_tensor_unsafe(host(impl.indices()), host(impl.values()), t.sizes());
  out._coalesced_(impl.coalesced());
  sparse_.push_back({t, out, nullptr});
  return out;
}

c10::Storage Mirror::host_storage(const c10::Storage &device) {
  for (const auto &[there, here] : storages_) {
    if (there.unsafeGetStorageImpl() == device.unsafeGetStorageImpl()) return here;
  }
  c10::DataPtr data(host_address(device.data()), c10::Device(c10::kCPU));
  c10::Storage out(c10::Storage::use_byte_size_t(), device.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU),
                   /*resizable=*/true);
  storages_.emplace_back(device, out);
  return out;
}

void Mirror::settle() {
  for (const auto &pair : dense_) {
    if (pair.host.storage().data() != pair.data) {
      const c10::Storage grown = to_device(pair.host.storage(), pair.device.device());
      auto *storage = pair.device.storage().unsafeGetStorageImpl();
      (void)storage->set_data_ptr(std::move(grown.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      storage->set_nbytes(grown.nbytes());
    }
    const bool same = pair.host.sizes() == pair.device.sizes() && pair.host.strides() == pair.device.strides() &&
                      pair.host.storage_offset() == pair.device.storage_offset();
    if (!same) copy_shape(pair.host, pair.device);
  }
  for (const auto &pair : sparse_) copy_sparse(pair.host, pair.device, pair.device.device());
}

Tensor Mirror::device(const Tensor &result, c10::Device device) {
  if (!result.defined()) return result;
  for (const auto &pair : result.is_sparse() ? sparse_ : dense_) {
    if (pair.host.is_same(result)) return pair.device;
  }
  if (result.is_sparse()) {
    // A new sparse tensor is on the current device.
    const c10::DeviceGuard guard(device);
    const c10::DispatchKeySet keys(c10::DispatchKey::SparseCUDA);
    Tensor out = at::detail::make_tensor<at::SparseTensorImpl>(keys, result.dtype());
    copy_sparse(result, out, device);
    return out;
  }
  for (const auto &[there, here] : storages_) {
    if (here.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
      return over(there, c10::DispatchKey::CUDA, result);
    }
  }
  c10::Storage made = to_device(result.storage(), device);
  // Another result may be a view of the same memory.
  storages_.emplace_back(made, result.storage());
  return over(std::move(made), c10::DispatchKey::CUDA, result);
}

void Mirror::copy_sparse(const Tensor &host, const Tensor &device, c10::Device place) {
  const auto &from = sparse_impl(host);
  auto &to = sparse_impl(device);
  if (host.sizes() != device.sizes() || from.sparse_dim() != to.sparse_dim()) {
    to.raw_resize_(from.sparse_dim(), from.dense_dim(), host.sizes());
  }
  to.set_indices_and_values_unsafe(this->device(from.indices(), place), this->device(from.values(), place));
  to.set_coalesced(from.coalesced());
}

}  // namespace simulated
