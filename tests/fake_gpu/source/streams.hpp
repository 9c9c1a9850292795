// Streams without a GPU. A kernel is done by the host at once, so all that a stream has to remember is which of
// nccl's operations, done by threads, it has been told to wait for. The next kernel on the stream waits for them.
//
//   operation   number k of a lane; a lane does its operations one after the other (nccl.py)
//   clock       of each lane, up to which operation one has waited: of a stream, of an event, of the host
//
// What has not waited for an operation must not touch its memory. `check` says so, whether or not the operation
// happens to be done by then: that does not depend on how fast the machine is.
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
  int64_t begin, end;
  bool is_written;
};

Memory memory_of(const at::Tensor& tensor, bool is_written);
Memory memory_of(const c10::Storage& storage); // all of it, which is to be freed

struct Operation {
  std::string name;
  int64_t lane, number;
  Clock before; // what the stream that launched it had waited for
  std::vector<Memory> memory;
};

// Put an operation into its lane, behind all that the device's current stream waits for.
std::shared_ptr<Operation> launch(
    const std::string& name, int64_t lane, c10::DeviceIndex device, std::vector<Memory> memory);
void done(const Operation& operation); // called by the lane's thread

Clock clock_of(const c10::Stream& stream);
Clock of_everything(); // all that was launched so far
Clock after(const Operation& operation);
void set_clock(const c10::Stream& stream, const Clock& clock);
void wait_on(const c10::Stream& stream, const Clock& clock); // the stream waits, the host does not
void wait_here(const Clock& clock);                          // the host waits
void wait_for(const std::string& what, const Clock& clock);  // the same, and the host does not know it
bool is_done(const Clock& clock);                            // and if so the host knows it from now on
int64_t when_done(const Clock& clock);                       // nanoseconds of a steady clock; waits

// Before a kernel called `name` touches `memory` on the device's current stream: throw if others may be at it, and
// wait for what the stream waits for.
void before_kernel(const std::string& name, c10::DeviceIndex device, const std::vector<Memory>& memory);

c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);
int64_t now();

} // namespace fake
