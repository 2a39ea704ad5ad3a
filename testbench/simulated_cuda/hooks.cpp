// What libtorch_cpu and programs ask of CUDA by name.

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "devices.h"
#include "memory.h"
#include "pinned.h"
#include "random.h"
#include "settings.h"

namespace at {

// libtorch looks for a class of this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return hasCUDA(); }
  bool hasCUDA() const override { return simulated::device_count() > 0; }
  bool hasCUDART() const override { return true; }
  long versionCUDART() const override { return 13000; }
  std::string showConfig() const override { return "simulated CUDA devices"; }

  // Device 0 is of a generation with instructions for bf16; the other is not.
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return simulated::current_device() == 0; }

  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(simulated::device_count()); }
  int getNumGPUs() const override { return simulated::device_count(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return simulated::current_device(); }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { simulated::exchange_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return simulated::exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return simulated::exchange_device(device); }
  void deviceSynchronize(DeviceIndex device) const override { simulated::synchronize(device); }

  bool isPinnedPtr(const void *p) const override { return simulated::is_pinned(p); }
  Allocator *getPinnedMemoryAllocator() const override { return &simulated::pinned_allocator(); }
  Allocator *getCUDADeviceAllocator() const override { return &simulated::device_allocator(); }
  Device getDeviceFromPtr(void *p) const override {
    const DeviceIndex device = simulated::device_of(p);
    TORCH_CHECK(device >= 0, "The specified pointer resides on host memory and is not registered with any device");
    return Device(kCUDA, device);
  }

  const Generator &getDefaultGenerator(DeviceIndex device) const override {
    return simulated::default_generator(device);
  }
  Generator getNewGenerator(DeviceIndex device) const override { return simulated::new_generator(device); }
};

using at::CUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

namespace cuda {

// Programs name this one to keep the library linked.
__attribute__((visibility("default"))) int warp_size() { return 32; }

}  // namespace cuda
}  // namespace at
