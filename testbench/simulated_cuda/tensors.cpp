// The kernels that cannot be the CPU's: making tensors, giving them memory, and copying to and from the host.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <string>

#include "arrivals.h"
#include "counters.h"
#include "devices.h"
#include "memory.h"
#include "mirror.h"
#include "pinned.h"

namespace simulated {
namespace {

using at::Tensor;

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::get_default_dtype_as_scalartype());
}

c10::Device or_current(std::optional<c10::Device> device) { return whole(device.value_or(c10::Device(c10::kCUDA))); }

void refuse_pinned(std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pinned);
  const c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_generic(size, &device_allocator(), kKeys, or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool> pinned) {
  refuse_pinned(pinned);
  const c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, or_default(dtype));
}

std::string describe(const Tensor &from, const Tensor &to) {
  return "copy_ " + std::string(toString(from.scalar_type())) + " " + from.device().str() + " to " + to.device().str();
}

Tensor &copy_(Tensor &self, const Tensor &from, bool non_blocking) {
  if (self.is_same(from) || self.numel() == 0) return self;
  Mirror mirror;
  const Tensor target = self.is_cuda() ? mirror.host(self) : self;
  const Tensor source = from.is_cuda() ? mirror.host(from) : from;
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (self.is_cuda() && from.is_cuda()) {
    note_launches(self.device().index(), describe(from, self));
    target.copy_(source);
    return self;
  }
  const bool to_host = self.is_cpu();
  const c10::DeviceIndex device = (to_host ? from : self).device().index();
  const bool waits = !non_blocking || (to_host && !is_pinned(self.const_data_ptr()));
  if (waits) {
    note_wait(device, to_host ? Wait::kCopyToHost : Wait::kCopyFromHost, describe(from, self));
    arrive_all();
    target.copy_(source);
  } else if (to_host) {
    send(source, target, current_stream(from.device()));
  } else {
    // From memory that is not pinned CUDA copies to a buffer of its own first, and does not wait.
    arrive_for(current_stream(self.device()), from);
    target.copy_(source);
  }
  return self;
}

void set_memory(Tensor &self, const c10::Storage &storage, int64_t offset, at::IntArrayRef size,
                at::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == self.device(), "set_storage: the storage is on ", storage.device(),
              " and the tensor on ", self.device());
  auto *impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
}

Tensor &set_part_of_storage(Tensor &self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                            at::IntArrayRef stride) {
  set_memory(self, storage, offset, size, stride);
  return self;
}

Tensor &set_storage(Tensor &self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  set_memory(self, storage, 0, {count}, {});
  return self;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_part_of_storage);
}

}  // namespace
}  // namespace simulated
