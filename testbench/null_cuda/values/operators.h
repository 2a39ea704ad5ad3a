// Which operators are computed, and how.
#pragma once

#include <string>

namespace null_cuda {

// Whether an operator only gives memory and views, or reads what is in memory: nothing is to be computed.
bool makes_no_numbers(const std::string &name);

// Whether the host code of an operator reads numbers of the device, which its kernels have not written.
bool depends_on_values(const std::string &name);

}  // namespace null_cuda
