// CPU tensors over the memory of the devices.
#pragma once

#include <ATen/core/Tensor.h>

namespace null_cuda {

// Whether a tensor has memory on a device of which there is a view.
bool is_dense_cuda(const at::Tensor &t);

// The CPU's tensor over the memory of a device tensor. It owns nothing.
at::Tensor view_of(const at::Tensor &t);

// The CPU's tensor over the parts of a sparse device tensor.
at::Tensor view_of_sparse(const at::Tensor &t);

// A new tensor of the device with the numbers of one of the CPU.
at::Tensor to_device(const at::Tensor &t, c10::Device device);

}  // namespace null_cuda
