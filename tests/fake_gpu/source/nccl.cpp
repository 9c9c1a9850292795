// nccl's process group as torch sees it. Python (nccl.py) runs the operations; here each one gets an
// Operation, and a Work whose wait() holds up the stream, not the host.
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>

#include "memory.hpp"
#include "streams.hpp"

namespace py = pybind11;
using at::Tensor;
using Tensors = std::vector<Tensor>;

namespace fake {
namespace {

c10::Stream stream_here() { return current_stream(-1); }

class Work : public c10d::Work {
 public:
  Work(std::shared_ptr<Operation> operation, Tensors outputs, bool blocks_host)
      : operation_(std::move(operation)), outputs_(std::move(outputs)), blocks_host_(blocks_host) {}

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (blocks_host_) wait_here(after(*operation_));
    wait_on(stream_here(), after(*operation_));
    return true;
  }
  void synchronize() override { wait(); }
  bool isCompleted() override { return is_done(after(*operation_)); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }

  // The future is complete at once. It knows the device, so it records an event in nccl's stream, after the operation.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto here = stream_here();
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{here.device()});
    auto of_nccl = new_stream(here.device_index());
    set_clock(of_nccl, after(*operation_));
    exchange_stream(of_nccl);
    future->markCompleted(c10::IValue(outputs_));
    exchange_stream(here);
    return future;
  }

 private:
  std::shared_ptr<Operation> operation_;
  Tensors outputs_;
  bool blocks_host_;
};

// DistributedDataParallel's timer for its own statistics.
struct Timer final : c10d::Timer {
  Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

class Nccl : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, py::object options)
      : Backend(rank, size),
        options(options),
        python_(py::module_::import("tests.fake_gpu.nccl").attr("Communicators")(store, rank, size, options)) {}
  ~Nccl() override {
    py::gil_scoped_acquire gil;
    python_ = options = py::object();
  }
  py::object options;

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { start("start_coalescing"); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override { return start("end_coalescing"); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start("broadcast", tensors, options.rootRank);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start("all_reduce", tensors, options.reduceOp);
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return start("reduce", tensors, options.reduceOp, options.rootRank);
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return start("all_gather", outputs.at(0), inputs.at(0));
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return start("all_gather_coalesced", Tensors{output}, Tensors{input});
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return start("all_gather_coalesced", outputs, inputs);
  }
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return start("gather", outputs.empty() ? Tensors() : outputs[0], inputs.at(0), options.rootRank);
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return start("scatter", outputs.at(0), inputs.empty() ? Tensors() : inputs[0], options.rootRank);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return start("reduce_scatter_coalesced", Tensors{output}, Tensors{input}, options.reduceOp);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return start("reduce_scatter_coalesced", outputs, inputs, options.reduceOp);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions&) override {
    return start("all_to_all", output, input, output_sizes, input_sizes);
  }
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int) override {
    return start("send", tensors.at(0), to);
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int) override {
    return start("recv", tensors.at(0), from);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override { return start("barrier"); }

 private:
  template <typename... Arguments>
  py::object call(const char* name, Arguments&&... arguments) {
    return python_.attr(name)(std::forward<Arguments>(arguments)...);
  }
  template <typename... Arguments>
  c10::intrusive_ptr<c10d::Work> start(const char* name, Arguments&&... arguments) {
    py::gil_scoped_acquire gil;
    auto work = call(name, std::forward<Arguments>(arguments)...);
    return work.is_none() ? nullptr : work.template cast<c10::intrusive_ptr<Work>>();
  }
  py::object python_;
};

std::shared_ptr<Operation> launched(
    const std::string& name, int64_t lane, const Tensors& reads, const Tensors& writes) {
  std::vector<Memory> memory;
  auto device = current_device();
  for (auto& tensor : reads) memory.push_back(memory_of(tensor, false));
  for (auto& tensor : writes) memory.push_back(memory_of(tensor, true));
  for (auto* tensors : {&reads, &writes})
    for (auto& tensor : *tensors) device = tensor.device().index();
  return launch(name, lane, device, std::move(memory));
}

} // namespace

void define(py::module_& module) {
  c10d::TimerRegistry()->Register(c10::kCUDA, [](c10::Device device) -> std::unique_ptr<c10d::Timer> {
    return std::make_unique<Timer>(device);
  });
  py::class_<Operation, std::shared_ptr<Operation>>(module, "Operation")
      .def(py::init(&launched))
      .def("wait_until_it_may_begin", [](const Operation& operation) { wait_for(operation.name, operation.before); })
      .def("done", [](const Operation& operation) { done(operation); });
  py::class_<Work, c10d::Work, c10::intrusive_ptr<Work>>(module, "Work")
      .def(py::init<std::shared_ptr<Operation>, Tensors, bool>());
  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(module, "ProcessGroupNCCL", py::dynamic_attr())
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int, py::object>())
      .def_property_readonly("options", [](const Nccl& group) { return group.options; })
      .def_property_readonly("uid", [](const Nccl&) { return 0; });
}

} // namespace fake

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(c10::DeviceType::CUDA, fake::allocator(), 1);
  module.def("leave_unchecked", [](std::set<std::string> names) { fake::unchecked = names; });
  module.def("on_host", &fake::on_host);
  module.def("resize_storage", [](c10::Storage storage, size_t bytes) { fake::resize(storage, bytes); });
  module.def("device_count", [] { return int(fake::device_count()); });
  module.def("current_device", [] { return int(fake::current_device()); });
  module.def("set_device", [](int device) { fake::set_device(device); });
  module.def("synchronize", [] { fake::wait_here(fake::of_everything()); });
  module.def("host_waits", &fake::host_waits);
  module.def("allocated_bytes", &fake::allocated_bytes);
  module.def("peak_bytes", &fake::peak_bytes);
  module.def("reset_peak", &fake::reset_peak);
  fake::define(module);
}
