// The sums, products and extremes of NCCL's collectives.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace null_cuda {

size_t size_of(ncclDataType_t type);

// Reduces `count` numbers of each rank, in the order of the ranks. Half numbers are rounded after each of them.
void reduce(char *to, const std::vector<const char *> &from, size_t count, ncclDataType_t type, ncclRedOp_t op);

}  // namespace null_cuda
