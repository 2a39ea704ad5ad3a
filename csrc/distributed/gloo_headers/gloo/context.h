// As much of gloo as torch/csrc/distributed/c10d/ProcessGroupGloo.hpp needs, because libtorch comes without gloo's
// headers. That header holds only pointers to these types, so their layout does not matter here. libtorch exports the
// functions.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {
namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

class Context {
 public:
  void closeConnections();
  void setTimeout(std::chrono::milliseconds timeout);  // used by an inline function that is never compiled here
};
}  // namespace gloo
