#include "memory.hpp"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "streams.hpp"

namespace fake {
namespace {

std::atomic<int64_t> allocated{0}, peak{0};
constexpr size_t HEADER = 64; // before each block: its size

struct Allocator final : c10::Allocator {
  static void release(void* block) {
    if (!block) return;
    auto start = static_cast<char*>(block) - HEADER;
    auto num_bytes = *reinterpret_cast<int64_t*>(start);
    allocated -= num_bytes;
    freed(block);
    memset(block, 0xDB, num_bytes); // whoever still reads it must not find what was there
    free(start);
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    c10::Device device(c10::DeviceType::CUDA, current_device());
    if (!num_bytes) return {nullptr, nullptr, &release, device};
    auto start = static_cast<char*>(malloc(num_bytes + HEADER));
    *reinterpret_cast<int64_t*>(start) = num_bytes;
    memset(start + HEADER, 0xCD, num_bytes); // fresh memory must not look like zeros
    auto total = allocated += num_bytes;
    if (total > peak) peak = total;
    allocated_here(start + HEADER);
    return {start + HEADER, start + HEADER, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const final { memcpy(to, from, count); }
};

Allocator the_allocator;

// Answers what torch asks about devices: the current one, streams, events.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  struct Event {
    Clock clock;
    int64_t recorded_at;
  };
  static Event& event(void* pointer) { return *static_cast<Event*>(pointer); }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, current_device()}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    set_device(device.index());
    return old;
  }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_done(clock_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_here(clock_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_here(of_everything()); }

  void record(void** pointer, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (!*pointer) *pointer = new Event;
    event(*pointer) = {clock_of(stream), now()};
  }
  void block(void* pointer, const c10::Stream& stream) const override {
    if (pointer) wait_on(stream, event(pointer).clock);
  }
  bool queryEvent(void* pointer) const override { return !pointer || is_done(event(pointer).clock); }
  void synchronizeEvent(void* pointer) const override {
    TORCH_CHECK(has_chosen_a_device(), "fake GPU: a thread that has chosen no device waits for an event, on GPU 0");
    if (pointer) wait_here(event(pointer).clock);
  }
  void destroyEvent(void* pointer, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(pointer);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return (reached(event(to)) - reached(event(from))) / 1e6;
  }
  static int64_t reached(const Event& event) {
    return std::max(event.recorded_at, when_done(event.clock));
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

} // namespace

c10::DeviceIndex device_count() {
  auto text = getenv("FAKE_GPUS");
  return text ? atoi(text) : 8;
}

c10::Allocator* allocator() { return &the_allocator; }
int64_t allocated_bytes() { return allocated; }
int64_t peak_bytes() { return peak; }
void reset_peak() { peak = allocated.load(); }

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto storage = tensor.storage();
  auto keep = new c10::Storage(storage);
  c10::DataPtr data(
      storage.mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); },
      c10::Device(c10::DeviceType::CPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  c10::DeviceGuard guard(device);
  at::Tensor result(at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      tensor.scalar_type()));
  on_host(result).copy_(tensor);
  return result;
}

void resize(const c10::Storage& storage, size_t num_bytes) {
  before_kernel("resize_", storage.device().index(), {memory_of(storage)}); // the old content is lost
  c10::DeviceGuard guard(storage.device());
  auto block = allocator()->allocate(num_bytes);
  if (auto kept = std::min(num_bytes, storage.nbytes())) memcpy(block.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(block));
  storage.set_nbytes(num_bytes);
}

} // namespace fake
