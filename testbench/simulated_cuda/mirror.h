// CPU tensors over the memory of device tensors, for the length of one operator.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace simulated {

class Mirror {
 public:
  // The tensor of the CPU with the numbers of `t`, a tensor of a device: the same memory, sizes and strides.
  at::Tensor host(const at::Tensor &t);

  // What an operator did to the sizes and the memory of the tensors that it was given.
  void settle();

  // A result of an operator as a tensor of `device`: one that it was given, a view of one, or a new one.
  at::Tensor device(const at::Tensor &result, c10::Device device);

 private:
  struct Pair {
    at::Tensor device, host;
    const void *data;  // where the host tensor's memory was
  };

  at::Tensor host_of_sparse(const at::Tensor &t);
  c10::Storage host_storage(const c10::Storage &device);
  void copy_sparse(const at::Tensor &host, const at::Tensor &device, c10::Device place);

  std::vector<Pair> dense_, sparse_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // of devices, and over the same memory on the host
};

}  // namespace simulated
