// Streams without a GPU. nccl's operations run on threads, and the host runs a kernel at once, when its stream has
// waited for what it must wait for.
//
//   lane        runs its operations one after the other: a communicator (nccl.py) or, with a negative number, a stream
//   operation   number k of a lane; those of a stream are its kernels
//   clock       the last operation of each lane that a stream, an event or the host has waited for
//
// A kernel or an operation must not touch memory unless its stream has waited for the last one that wrote to it, or,
// before it writes, for all that have read it since. To free memory is a write by the stream that allocated it, which
// gets it again first. A mistake is refused even if the other one has ended by then, so the verdict does not depend on
// the speed of the machine.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fake {

using Clock = std::map<int64_t, int64_t>; // lane -> number of its last operation that is waited for

struct Memory { // a part of a storage, in bytes
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* block;
  int64_t begin, end;
  bool is_written;
};

Memory memory_of(const at::Tensor& tensor, bool is_written);
Memory memory_of(const c10::Storage& storage); // the full storage, before it is freed

struct Operation {
  std::string name;
  int64_t lane, number;
  Clock before; // what the launching stream had waited for
  std::vector<Memory> memory;
};

// Put an operation into its lane. It runs after everything that the device's current stream waits for.
std::shared_ptr<Operation> launch(
    const std::string& name, int64_t lane, c10::DeviceIndex device, std::vector<Memory> memory);
void done(const Operation& operation); // called by the lane's thread

Clock clock_of(const c10::Stream& stream);
Clock of_everything(); // every operation launched so far
Clock after(const Operation& operation);
void set_clock(const c10::Stream& stream, const Clock& clock);
void wait_on(const c10::Stream& stream, const Clock& clock); // the stream waits, the host does not
void wait_here(const Clock& clock);                          // the host waits
void wait_for(const std::string& what, const Clock& clock);  // the host waits, but its clock stays as it is
bool is_done(const Clock& clock);                            // if it is, the host's clock includes it
int64_t when_done(const Clock& clock);                       // nanoseconds of a steady clock; waits

// Call this before the kernel `name` touches `memory` on the device's current stream. It throws if an operation may
// use that memory, and waits for what the stream waits for.
void before_kernel(const std::string& name, c10::DeviceIndex device, const std::vector<Memory>& memory);

// A block of memory is allocated for the current stream. record_stream keeps it from being given out again too early.
void allocated_here(const void* block);
void recorded(const void* block);
void freed(const void* block);

int64_t host_waits(); // how often the host has waited for the GPU
c10::DeviceIndex current_device();
bool has_chosen_a_device(); // this thread
void set_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);
int64_t now();

} // namespace fake
