// Every kernel is the CPU's, on the same memory. One fallback serves all operators except those of memory itself.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.hpp"
#include "streams.hpp"

namespace fake {

std::set<std::string> unchecked; // "aten::add.Tensor"

namespace {

using c10::Device;
using c10::IValue;
using c10::SymInt;
using c10::SymIntArrayRef;
using at::Tensor;
template <typename T>
using Maybe = std::optional<T>;

const c10::DispatchKeySet CUDA(c10::DispatchKey::CUDA);

template <typename F>
void each_tensor(const IValue& value, F visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isList()) {
    for (const auto& element : value.toListRef())
      if (element.isTensor()) visit(element.toTensor());
  }
}

// Finds the device of a call, and refuses wrong arguments as torch's own wrappers do: single numbers may come from the
// host where native_functions.yaml says `device_check: NoCheck`, but not in a list; indices may, where torch copies them.
Maybe<Device> device_of(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  auto& name = schema.name();
  static const std::set<std::string> indexing{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  bool lets_numbers_pass = unchecked.count(name + "." + schema.overload_name());
  Maybe<Device> found;
  bool is_any_on_host = false;
  auto refuse = [&](Device other) {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
        other, "! (", name, ")");
  };
  for (auto& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (!tensor.is_cuda()) {
        bool may_pass = argument.isTensor() ? lets_numbers_pass && tensor.dim() == 0 : indexing.count(name) > 0;
        is_any_on_host = is_any_on_host || !may_pass;
      } else {
        if (found && *found != tensor.device()) refuse(tensor.device());
        found = tensor.device();
      }
    });
    if (argument.isDevice() && argument.toDevice().is_cuda() && !found) found = argument.toDevice();
  }
  if (found && is_any_on_host) refuse(Device(c10::DeviceType::CPU));
  if (found && found->index() < 0) found = Device(c10::DeviceType::CUDA, current_device());
  return found;
}

IValue as_cpu(const IValue& value, bool is_written) {
  if (value.isTensor()) {
    auto tensor = value.toTensor();
    if (tensor.defined() && tensor.is_cuda() && !tensor.numel() && is_written) // an out= that will be resized
      return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()));
    return on_host(tensor);
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_host(tensor));
    return list;
  }
  if (value.isList()) {
    bool has_tensors = false;
    each_tensor(value, [&](const Tensor&) { has_tensors = true; });
    if (!has_tensors) return value;
    c10::List<Maybe<Tensor>> list;
    for (const auto& element : value.toListRef())
      list.push_back(element.isTensor() ? Maybe<Tensor>(on_host(element.toTensor())) : std::nullopt);
    return list;
  }
  return value.isDevice() ? IValue(Device(c10::DeviceType::CPU)) : value;
}

IValue as_cuda(const IValue& value, Device device) {
  if (value.isTensor()) return on_device(value.toTensor(), device);
  if (!value.isTensorList()) return value;
  c10::List<Tensor> list;
  for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_device(tensor, device));
  return list;
}

Tensor& share(Tensor& self, const Tensor& other) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(other.storage());
  impl->set_storage_offset(other.storage_offset());
  impl->set_sizes_and_strides(other.sizes(), other.strides());
  return self;
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto& parameters = schema.arguments();
  size_t count = parameters.size(), base = stack->size() - count;
  std::vector<IValue> arguments(stack->begin() + base, stack->end());
  auto device = device_of(schema, arguments);
  auto is_written = [&](size_t i) { return parameters[i].alias_info() && parameters[i].alias_info()->isWrite(); };

  std::vector<Memory> memory;
  for (size_t i = 0; i < count; i++) {
    each_tensor(arguments[i], [&](const Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) memory.push_back(memory_of(tensor, is_written(i)));
    });
  }
  if (device) before_kernel(schema.name(), device->index(), memory);

  for (size_t i = 0; i < count; i++) (*stack)[base + i] = as_cpu(arguments[i], is_written(i));
  std::vector<IValue> given(stack->begin() + base, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (!device) return;

  // If a result is one of the arguments, as for add_ or out=, return that argument.
  size_t first = stack->size() - schema.returns().size();
  for (size_t r = 0; r < schema.returns().size(); r++) {
    auto& result = (*stack)[first + r];
    auto* alias = schema.returns()[r].alias_info();
    bool is_argument = false;
    for (size_t i = 0; alias && alias->isWrite() && i < count && !is_argument; i++) {
      if (!parameters[i].alias_info() || !(*parameters[i].alias_info() == *alias)) continue;
      is_argument = true;
      if (arguments[i].isTensor()) {
        auto computed = given[i].toTensor();
        auto argument = arguments[i].toTensor();
        if (argument.is_cuda() && !argument.sizes().equals(computed.sizes()))
          share(argument, on_device(computed, argument.device()));
      }
      result = arguments[i];
    }
    if (!is_argument) result = as_cuda(result, *device);
  }
}

// Operators that make, copy and view memory.

template <typename F>
Tensor made_on(Maybe<Device> device, F make) {
  auto index = device && device->index() >= 0 ? device->index() : current_device();
  TORCH_CHECK(index < device_count(), "CUDA error: invalid device ordinal ", int(index));
  c10::DeviceGuard guard({c10::DeviceType::CUDA, index});
  return Tensor(make());
}

Tensor empty(
    SymIntArrayRef size, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<Device> device, Maybe<bool>,
    Maybe<at::MemoryFormat> format) {
  return made_on(device, [&] {
    auto type = dtype.value_or(at::typeMetaToScalarType(c10::get_default_dtype()));
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), allocator(), CUDA, type, format);
  });
}

Tensor empty_strided(
    SymIntArrayRef size, SymIntArrayRef stride, Maybe<at::ScalarType> dtype, Maybe<at::Layout>,
    Maybe<Device> device, Maybe<bool>) {
  return made_on(device, [&] {
    auto type = dtype.value_or(at::typeMetaToScalarType(c10::get_default_dtype()));
    return at::detail::empty_strided_generic(
        C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(), CUDA, type);
  });
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  auto device = self.is_cuda() ? self.device() : source.device();
  std::vector<Memory> memory;
  if (self.is_cuda()) memory.push_back(memory_of(self, true));
  if (source.is_cuda()) memory.push_back(memory_of(source, false));
  before_kernel("aten::copy_", device.index(), memory);
  bool passes_the_host = !self.is_cuda() || !source.is_cuda();
  if (passes_the_host && !non_blocking) wait_here(clock_of(current_stream(device.index())));
  on_host(self).copy_(on_host(source));
  return self;
}

at::Scalar read_one(const Tensor& self) {
  before_kernel("aten::item", self.device().index(), {memory_of(self, false)});
  wait_here(clock_of(current_stream(self.device().index())));
  return on_host(self).item();
}

const Tensor& resize_tensor(const Tensor& self, SymIntArrayRef size, Maybe<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (impl->numel() + impl->storage_offset()) * self.itemsize();
  if (impl->storage().nbytes() < needed) resize(impl->storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes() / self.itemsize())});
  return self;
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, Maybe<SymInt> offset) {
  auto at = offset ? Maybe<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(Tensor& tensor, c10::Stream) { recorded(tensor.storage().data()); }

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

} // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("_local_scalar_dense", &read_one);
  library.impl("resize_", &resize_tensor);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &share);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("record_stream", &record_stream);
}

} // namespace fake
