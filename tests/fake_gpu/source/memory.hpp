// The memory of the fake devices: the host's.
#pragma once

#include <ATen/ATen.h>

namespace fake {

c10::DeviceIndex device_count();
c10::Allocator* allocator();
int64_t allocated_bytes();
int64_t peak_bytes();
void reset_peak();

at::Tensor on_host(const at::Tensor& tensor); // the same memory as a CPU tensor; others as they are
at::Tensor on_device(const at::Tensor& tensor, c10::Device device); // a copy; what is there already as it is
void resize(const c10::Storage& storage, size_t num_bytes);

} // namespace fake
