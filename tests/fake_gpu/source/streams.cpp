#include "streams.hpp"

#include <Python.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <list>
#include <mutex>
#include <optional>

namespace fake {
namespace {

struct Lane {
  int64_t launched = 0;
  std::vector<int64_t> done_at; // done_at[k - 1] is the time when operation k ended
};

struct Access { // to a part of a block, by a kernel
  std::string name;
  int64_t lane, number, begin, end;
  bool is_written;
};

struct Block {
  c10::Stream owner;
  std::vector<Access> accesses;
  bool is_recorded = false;
};

std::mutex mutex;
std::condition_variable changed;
std::map<int64_t, Lane> lanes;
std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Clock> clocks;
Clock host;
std::list<std::shared_ptr<Operation>> under_way; // running, or ended and not yet waited for by all
std::map<const void*, Block> blocks;
std::map<int64_t, int64_t> kernels; // launched in each stream's lane
std::string freed_too_early;        // told by the next kernel, since freeing cannot throw
int64_t waits = 0;
thread_local c10::DeviceIndex device_of_thread = -1;
thread_local std::map<c10::DeviceIndex, c10::StreamId> stream_of_thread;
c10::StreamId streams_made = 0;

void merge(Clock& into, const Clock& from) {
  for (auto [lane, number] : from) {
    auto& known = into[lane];
    known = std::max(known, number);
  }
}

bool covers(const Clock& clock, int64_t lane, int64_t number) {
  auto found = clock.find(lane);
  return found != clock.end() && found->second >= number;
}

bool all_done(const Clock& clock) {
  for (auto [lane, number] : clock)
    if (lane > 0 && static_cast<int64_t>(lanes[lane].done_at.size()) < number) return false;
  return true;
}

void forget_what_the_host_knows() {
  under_way.remove_if([](auto& operation) {
    bool is_known = covers(host, operation->lane, operation->number);
    bool is_gone = true;
    for (auto& memory : operation->memory) is_gone = is_gone && memory.storage.expired();
    return is_known || is_gone;
  });
}

Clock known(const c10::Stream& stream) {
  Clock clock = clocks[{stream.device_index(), stream.id()}];
  merge(clock, host);
  return clock;
}

// Python's threads run the operations, so a thread that waits for an operation releases the GIL.
struct WithoutGil {
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

double timeout() {
  auto text = getenv("FAKE_TIMEOUT");
  return text ? atof(text) : 25;
}

[[noreturn]] void report_deadlock(const std::string& what) {
  auto state = PyGILState_Ensure();
  fprintf(stderr, "fake GPU: a deadlock, %s waits for what never ends\n", what.c_str());
  PyRun_SimpleString("import faulthandler, sys; sys.stdout.flush(); faulthandler.dump_traceback(all_threads=False)");
  (void)state;
  _exit(9);
}

void wait(const Clock& clock, const std::string& what) {
  WithoutGil released;
  std::unique_lock lock(mutex);
  auto limit = std::chrono::duration<double>(timeout());
  if (!changed.wait_for(lock, limit, [&] { return all_done(clock); })) {
    lock.unlock();
    report_deadlock(what);
  }
}

int64_t lane_of(const c10::Stream& stream) { return -1 - stream.device_index() - 1000 * stream.id(); }

bool overlap(const Memory& one, const Memory& other) {
  return (one.is_written || other.is_written) && !other.storage.expired() &&
      one.storage._unsafe_get_target() == other.storage._unsafe_get_target() && one.begin < other.end &&
      other.begin < one.end;
}

// The caller holds the mutex.
void check(const std::string& name, const std::vector<Memory>& memory, const Clock& clock, int64_t own_lane) {
  for (auto& operation : under_way) {
    if (operation->lane == own_lane || covers(clock, operation->lane, operation->number)) continue;
    for (auto& mine : memory)
      for (auto& its : operation->memory)
        TORCH_CHECK(
            !overlap(mine, its), "fake GPU: ", name, mine.is_written ? " writes to" : " reads",
            " memory that ", operation->name, its.is_written ? " writes to" : " reads",
            ", and its stream has not waited for that");
  }
  for (auto& mine : memory) {
    auto found = blocks.find(mine.block);
    if (found == blocks.end()) continue;
    for (auto& its : found->second.accesses)
      TORCH_CHECK(
          !(mine.is_written || its.is_written) || mine.begin >= its.end || its.begin >= mine.end ||
              its.lane == own_lane || covers(clock, its.lane, its.number),
          "fake GPU: ", name, mine.is_written ? " writes to" : " reads", " memory that ", its.name, " on another stream ",
          its.is_written ? "writes to" : "reads", ", and its stream has not waited for that");
  }
}

void remember(const std::string& name, const std::vector<Memory>& memory, int64_t lane, int64_t number) {
  for (auto& mine : memory) {
    auto found = blocks.find(mine.block);
    if (found == blocks.end()) continue;
    auto& accesses = found->second.accesses;
    std::erase_if(accesses, [&](auto& its) { // this access comes after them, and covers them
      bool is_inside = mine.begin <= its.begin && its.end <= mine.end;
      return is_inside && (mine.is_written || (its.lane == lane && !its.is_written));
    });
    accesses.push_back({name, lane, number, mine.begin, mine.end, mine.is_written});
  }
}

} // namespace

void allocated_here(const void* block) {
  std::lock_guard lock(mutex);
  blocks.insert_or_assign(block, Block{current_stream(-1)});
}

void recorded(const void* block) {
  std::lock_guard lock(mutex);
  if (auto found = blocks.find(block); found != blocks.end()) found->second.is_recorded = true;
}

void freed(const void* block) {
  std::lock_guard lock(mutex);
  auto found = blocks.find(block);
  if (found == blocks.end()) return;
  auto& [owner, accesses, is_recorded] = found->second;
  auto clock = known(owner);
  for (auto& its : accesses)
    if (!is_recorded && its.lane != lane_of(owner) && !covers(clock, its.lane, its.number))
      freed_too_early = "memory was freed that " + its.name + " on another stream " +
          (its.is_written ? "writes to" : "reads") + ", and the stream that allocated it has not waited for that";
  blocks.erase(found);
}

int64_t host_waits() { return waits; }

Memory memory_of(const at::Tensor& tensor, bool is_written) {
  int64_t begin = tensor.storage_offset(), end = begin + (tensor.numel() ? 1 : 0);
  for (int64_t dim = 0; dim < tensor.dim() && tensor.numel(); dim++)
    end += (tensor.size(dim) - 1) * tensor.stride(dim);
  int64_t bytes = tensor.element_size();
  return {tensor.storage().getWeakStorageImpl(), tensor.storage().data(), begin * bytes, end * bytes, is_written};
}

Memory memory_of(const c10::Storage& storage) {
  return {storage.getWeakStorageImpl(), storage.data(), 0, static_cast<int64_t>(storage.nbytes()), true};
}

std::shared_ptr<Operation> launch(
    const std::string& name, int64_t lane, c10::DeviceIndex device, std::vector<Memory> memory) {
  std::lock_guard lock(mutex);
  forget_what_the_host_knows();
  auto operation = std::make_shared<Operation>();
  *operation = {name, lane, ++lanes[lane].launched, known(current_stream(device)), std::move(memory)};
  check(name, operation->memory, operation->before, lane);
  under_way.push_back(operation);
  return operation;
}

void done(const Operation& operation) {
  std::lock_guard lock(mutex);
  lanes[operation.lane].done_at.push_back(now());
  changed.notify_all();
}

Clock clock_of(const c10::Stream& stream) {
  std::lock_guard lock(mutex);
  return known(stream);
}

Clock of_everything() {
  std::lock_guard lock(mutex);
  Clock clock;
  for (auto& [lane, state] : lanes) clock[lane] = state.launched;
  for (auto& [lane, launched] : kernels) clock[lane] = launched;
  return clock;
}

Clock after(const Operation& operation) {
  Clock clock = operation.before;
  merge(clock, {{operation.lane, operation.number}});
  return clock;
}

void set_clock(const c10::Stream& stream, const Clock& clock) {
  std::lock_guard lock(mutex);
  clocks[{stream.device_index(), stream.id()}] = clock;
}

void wait_on(const c10::Stream& stream, const Clock& clock) {
  std::lock_guard lock(mutex);
  merge(clocks[{stream.device_index(), stream.id()}], clock);
}

void wait_for(const std::string& what, const Clock& clock) { wait(clock, what); }

void wait_here(const Clock& clock) {
  wait(clock, "the host");
  std::lock_guard lock(mutex);
  waits++;
  merge(host, clock);
}

bool is_done(const Clock& clock) {
  std::lock_guard lock(mutex);
  if (!all_done(clock)) return false;
  merge(host, clock);
  return true;
}

int64_t when_done(const Clock& clock) {
  wait(clock, "the host");
  std::lock_guard lock(mutex);
  merge(host, clock);
  int64_t last = 0;
  for (auto [lane, number] : clock)
    if (lane > 0 && number > 0) last = std::max(last, lanes[lane].done_at[number - 1]);
  return last;
}

void before_kernel(const std::string& name, c10::DeviceIndex device, const std::vector<Memory>& memory) {
  Clock clock;
  {
    std::lock_guard lock(mutex);
    TORCH_CHECK(freed_too_early.empty(), "fake GPU: ", std::exchange(freed_too_early, ""), " (seen by ", name, ")");
    auto stream = current_stream(device);
    auto lane = lane_of(stream);
    clock = known(stream);
    check(name, memory, clock, lane);
    auto number = clocks[{stream.device_index(), stream.id()}][lane] = ++kernels[lane];
    remember(name, memory, lane, number);
    if (all_done(clock)) return;
  }
  wait(clock, name);
}

c10::DeviceIndex current_device() { return std::max<c10::DeviceIndex>(device_of_thread, 0); }

bool has_chosen_a_device() { return device_of_thread >= 0; }

void set_device(c10::DeviceIndex device) {
  if (device >= 0) device_of_thread = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  c10::Device on(c10::DeviceType::CUDA, device < 0 ? current_device() : device);
  auto found = stream_of_thread.find(on.index());
  return c10::Stream(c10::Stream::UNSAFE, on, found == stream_of_thread.end() ? 0 : found->second);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto old = current_stream(stream.device_index());
  stream_of_thread[stream.device_index()] = stream.id();
  return old;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  std::lock_guard lock(mutex);
  return c10::Stream(c10::Stream::UNSAFE, {c10::DeviceType::CUDA, device}, ++streams_made);
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

} // namespace fake
