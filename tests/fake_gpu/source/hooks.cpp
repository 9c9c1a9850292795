// Answers to what torch asks before it uses CUDA: is there a device, and where do random numbers come from. This is
// loaded before torch asks, because torch remembers the answers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  static DeviceIndex count() {
    auto text = getenv("FAKE_GPUS");
    return text ? atoi(text) : 8;
  }
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count(); }
  int getNumGPUs() const override { return count(); }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return true; } // a copy to the host is complete when it returns
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetDefaultCPUAllocator(); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
  // Kernels are the CPU's, so they draw from the CPU's generator.
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
};

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", CUDAHooks)

} // namespace at
