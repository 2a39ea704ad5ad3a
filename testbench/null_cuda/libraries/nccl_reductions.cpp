#include "nccl_reductions.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

namespace null_cuda {
namespace {

template <typename T>
T read(const char *from, size_t index) {
  T out;
  std::memcpy(&out, from + index * sizeof(T), sizeof(T));
  return out;
}

// NaN wins over every other number.
template <typename Wide>
Wide combine(Wide a, Wide b, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return static_cast<Wide>(a * b);
    case ncclMax:
      return b > a || b != b ? b : a;
    case ncclMin:
      return b < a || b != b ? b : a;
    default:
      return static_cast<Wide>(a + b);
  }
}

template <typename T, typename Wide>
void reduce_as(char *to, const std::vector<const char *> &from, size_t count, ncclRedOp_t op) {
  for (size_t i = 0; i < count; ++i) {
    auto all = static_cast<Wide>(read<T>(from[0], i));
    for (size_t rank = 1; rank < from.size(); ++rank) {
      const auto other = static_cast<Wide>(read<T>(from[rank], i));
      all = static_cast<Wide>(static_cast<T>(combine(all, other, op)));
    }
    if (op == ncclAvg) all = all / static_cast<Wide>(from.size());
    const auto out = static_cast<T>(all);
    std::memcpy(to + i * sizeof(T), &out, sizeof(T));
  }
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

void reduce(char *to, const std::vector<const char *> &from, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclInt8:
      return reduce_as<int8_t, int8_t>(to, from, count, op);
    case ncclUint8:
      return reduce_as<uint8_t, uint8_t>(to, from, count, op);
    case ncclInt32:
      return reduce_as<int32_t, int32_t>(to, from, count, op);
    case ncclUint32:
      return reduce_as<uint32_t, uint32_t>(to, from, count, op);
    case ncclInt64:
      return reduce_as<int64_t, int64_t>(to, from, count, op);
    case ncclUint64:
      return reduce_as<uint64_t, uint64_t>(to, from, count, op);
    case ncclFloat16:
      return reduce_as<c10::Half, float>(to, from, count, op);
    case ncclBfloat16:
      return reduce_as<c10::BFloat16, float>(to, from, count, op);
    case ncclFloat32:
      return reduce_as<float, float>(to, from, count, op);
    case ncclFloat64:
      return reduce_as<double, double>(to, from, count, op);
    default:
      return;
  }
}

}  // namespace null_cuda
