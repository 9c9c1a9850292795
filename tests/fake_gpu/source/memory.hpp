// The fake devices use the host's memory.
#pragma once

#include <ATen/ATen.h>

#include <set>
#include <string>

namespace fake {

extern std::set<std::string> unchecked; // operators to which torch gives single numbers of the host
c10::DeviceIndex device_count();
c10::Allocator* allocator();
int64_t allocated_bytes();
int64_t peak_bytes();
void reset_peak();

at::Tensor on_host(const at::Tensor& tensor); // a CPU tensor of the same memory; CPU tensors are returned as they are
at::Tensor on_device(const at::Tensor& tensor, c10::Device device); // a copy, unless it is there already
void resize(const c10::Storage& storage, size_t num_bytes);

} // namespace fake
