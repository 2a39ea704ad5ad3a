// The current device of each thread.
#pragma once

namespace null_cuda {

int current_device();

}  // namespace null_cuda
