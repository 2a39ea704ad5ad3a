// Loops over several CPU tensors, distributed over libtorch's threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tamp {

// A range of the elements of a tensor.
struct Chunk {
  size_t tensor;
  int64_t begin, end;
};

// Divides tensors, whose sizes are given, into chunks of at most 64 Ki elements. The chunks do not depend on the number
// of threads, so that sums over them do not either.
inline std::vector<Chunk> chunks(const std::vector<int64_t> &sizes) {
  constexpr int64_t kElements = 65536;
  std::vector<Chunk> out;
  out.reserve(sizes.size());
  for (size_t tensor = 0; tensor < sizes.size(); ++tensor) {
    for (int64_t begin = 0; begin < sizes[tensor]; begin += kElements) {
      out.push_back({tensor, begin, std::min(begin + kElements, sizes[tensor])});
    }
  }
  return out;
}

// Calls `f(i)` for every i below `count`, in any order. It uses a TensorIterator, which runs on libtorch's own threads:
// at::parallel_for is a template and runs in parallel only if this crate is compiled with OpenMP.
template <typename F>
void in_parallel(int64_t count, const F &f) {
  if (count == 0) return;
  at::Tensor places = at::empty({count}, at::kByte);
  const char *first = static_cast<const char *>(places.data_ptr());
  auto iterator = at::TensorIterator::nullary_op(places);
  iterator.for_each(
      [&](char **data, const int64_t *strides, int64_t columns, int64_t rows) {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t start = data[0] + row * strides[1] - first;
          for (int64_t column = 0; column < columns; ++column) f(start + column * strides[0]);
        }
      },
      /*grain_size=*/1);
}

// Where a pass on a single thread begins. A backward pass computes the gradients of the first parameters last, so a
// check that begins at the start finds them in the cache. It leaves those at the end in the cache, and the next pass
// begins there.
enum class From { kStart, kEnd };

// Calls `f(i)` for every chunk, in parallel if there are enough elements to make up for the cost of threads.
template <typename F>
void for_each(const std::vector<Chunk> &chunks, From from, const F &f) {
  constexpr int64_t kWorthThreads = 32768;
  int64_t elements = 0;
  for (const auto &chunk : chunks) elements += chunk.end - chunk.begin;
  const auto count = static_cast<int64_t>(chunks.size());
  if (elements >= kWorthThreads && count > 1 && at::get_num_threads() > 1) {
    in_parallel(count, f);
  } else {
    for (int64_t i = 0; i < count; ++i) f(from == From::kStart ? i : count - 1 - i);
  }
}

// Calls `f` with a null pointer to the C++ type of a floating-point dtype. For another dtype it returns false and does
// not call `f`.
template <typename F>
bool with_floating(at::ScalarType dtype, const F &f) {
  switch (dtype) {
    case at::kFloat:
      return f(static_cast<float *>(nullptr)), true;
    case at::kDouble:
      return f(static_cast<double *>(nullptr)), true;
    case at::kBFloat16:
      return f(static_cast<c10::BFloat16 *>(nullptr)), true;
    case at::kHalf:
      return f(static_cast<c10::Half *>(nullptr)), true;
    default:
      return false;
  }
}

}  // namespace tamp
