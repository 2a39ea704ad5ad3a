#pragma once

namespace gloo {
namespace transport {
class Device;
}
}  // namespace gloo
