// How the stand-ins define the functions of CUDA's libraries.
#pragma once

#define NULL_CUDA_API extern "C" __attribute__((visibility("default")))

namespace null_cuda {

// Writes a value, and returns success, which is zero in every library.
template <typename Status, typename Out, typename Value>
Status give(Out *out, const Value &value) {
  *out = value;
  return Status{};
}

}  // namespace null_cuda
