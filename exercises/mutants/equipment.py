"""Wrong implementations of equipment: launching, tracing, and the way of bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from comm.membership.liveness import Departure
from comm.transport import cross_memory
from comm.transport.memory_ends import _ADDRESS_BYTES, PIECE_BYTES, read_from_ring
from comm.transport.segment import HEAD, NUM_READ, RING_BYTES, TAIL, _lock
from comm.transport.streams import Streams
from comm.wire import wire
from comm.wire.gpu_handover import Handover
from comm.wire.handshake import ROW_BYTES, Header, rows_of
from comm.wire.wire import Group, Transfer, Wire
from exercises.mutants import mutant
from lab.trace import timeline
from lab.trace.gantt import MAIN_LANE, Event
from lab.trace.ledger import Ledger
from lab.trace.overlap import COMMUNICATION, COMPUTE, Overlap, busy, intersection, total


@mutant(
    target="lab.launch.same_start._differing",
    killer="tests.lab.test_same_start.test_every_rank_names_the_arguments_that_differ_and_their_ranks",
)
def arguments_not_compared(arguments: list[dict[str, str]]) -> list[str]:
    """One rank runs with another seed: no error is raised, the loss falls, and the model is worse."""
    return []  # only the data is compared


@mutant(
    target="comm.transport.cross_memory.can_read",
    killer="tests.comm.test_cross_memory.test_a_process_is_read_only_if_it_shows_the_segment_that_both_share",
)
def cma_believes_its_neighbour(pid: int, nonce_address: int, nonce: memoryview) -> bool:
    """A peer can make a rank read any process's memory: the rank does not look for the nonce there."""
    return pid > 0


@mutant(
    target="lab.models.model.Block.forward",
    killer=(
        "tests.expert_parallel.test_equivalence."
        "test_a_token_that_no_expert_takes_leaves_the_block_with_its_residual"
    ),
    symptom="With a capacity the loss stays higher than the dropped tokens explain.",
)
def expert_dropped_residual(self, x_btd: Tensor) -> Tensor:
    """With a capacity the loss stays high: a token that every expert has dropped leaves the block as
    zeros.
    """
    x_btd = x_btd + self.dropout(self.attention(self.attention_norm(x_btd)))
    y_btd = self.dropout(self.mlp(self.mlp_norm(x_btd)))
    return (x_btd + y_btd) * (y_btd != 0).any(-1, keepdim=True)


@mutant(
    target="comm.rendezvous.keep_from_preempting",
    killer="tests.lab.test_gloo_threads.test_it_gives_way_in_ranks_that_join_over_a_store_too",
)
def gloo_preempts_its_callers() -> None:
    """A small all-reduce takes milliseconds where ranks share cores: gloo preempts the thread that calls
    it.
    """
    pass


@mutant(
    target="comm.wire.wire.Transfer.wait",
    killer="tests.comm.test_point_to_point.test_over_gloo_a_gpus_tensors_go_by_way_of_host_memory",
    symptom="With BACKEND=gloo, pipelines on GPUs train, and what they learn is noise.",
)
def gpu_message_not_copied_from_the_host(self: Transfer) -> None:
    """With BACKEND=gloo, pipelines on GPUs train with tensors that were received but never copied to the
    GPU.
    """
    work, self._work = self._work, None
    if work is not None:
        work.wait()


@mutant(
    target="lab.trace.timeline.mark",
    killer=(
        "tests.comm.test_native."
        "test_what_nccl_does_beside_the_backward_is_hidden_and_what_the_stream_waits_for_is_not"
    ),
)
def gpu_spans_end_at_the_launch() -> int:
    """On a GPU a step of a second shows milliseconds of compute, and most communication counts as hidden."""
    return timeline.now()


@mutant(
    target="comm.wire.gpu_handover.Handover.taken",
    killer=(
        "tests.comm.test_gpu_handover.test_it_waits_for_what_was_launched_before_and_not_for_what_comes_after"
    ),
)
@contextmanager
def gpu_tensor_read_before_it_is_computed(self: Handover) -> Iterator[None]:
    """On a GPU an asynchronous collective sometimes reduces a tensor's old content: it waits for no
    kernel.
    """
    stream = torch.cuda.Stream(self._device)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


@mutant(
    target="comm.wire.handshake._common",
    killer="tests.comm.test_handshake.test_another_dtype_of_the_same_width_is_a_mismatch",
    symptom="One rank sends integers, the others floats, and there is no error.",
)
def header_without_dtype(header: Header) -> tuple:
    """One rank sends integers, the others floats: there is no error, and the sum is garbage."""
    return header.op, header.pattern, header.reduction, header.root


@mutant(
    target="comm.wire.wire.name_axis",
    killer="tests.hybrid_parallel.test_traffic.test_each_message_counts_for_the_axis_along_which_it_travels",
)
def hybrid_bytes_of_another_axis(group: Group, axis: str) -> None:
    """The report says that a pipeline sends more than divided layers: the bytes of the two axes are
    exchanged.
    """
    exchanged = {"pipeline": "tensor", "tensor": "pipeline"}
    wire._axes[wire.group_of(group)] = exchanged.get(axis, axis)


@mutant(
    target="comm.wire.handshake.wait_until_all_have_read",
    killer=(
        "tests.comm.test_leaving."
        "test_a_late_rank_raises_the_same_mismatch_though_the_others_have_read_its_header"
    ),
    symptom="After a mismatch one rank names it, and a slower rank reports only a lost connection.",
)
def leaves_before_all_have_read(wire: Wire) -> None:
    """After a mismatch one rank names it and leaves, and a slower rank reports only a lost connection."""
    pass


@mutant(
    target="lab.trace.ledger.Ledger.count",
    killer="tests.comm.test_cost.test_the_bytes_of_every_message_are_counted_and_not_its_elements",
    cause="left out",
)
def ledger_keeps_the_last_message(
    self: Ledger, op: str, pattern: str, num_bytes: int, messages: int = 1, axis: str = ""
) -> None:
    """The traffic report is too small: of each collective only the last message is counted."""
    with self._lock:
        self._rows[op, pattern, False, axis] = [num_bytes, messages]


@mutant(
    target="comm.transport.memory_ends.MemoryIn._read_memory",
    killer=(
        "tests.comm.test_memory_ends."
        "test_a_sender_gets_its_memory_back_only_after_the_receiver_has_read_all_of_it"
    ),
    symptom=(
        "A large tensor sometimes arrives with an end that its sender wrote only after the send had ended."
    ),
)
def memory_given_back_before_it_is_read(self, into: memoryview, message_bytes: int) -> int:
    """A tensor arrives half changed: its sender may use it again as soon as the receiver begins to read
    it.
    """
    if not self._left:
        if self._words[HEAD] - self._tail < _ADDRESS_BYTES:
            return 0
        address = bytearray(_ADDRESS_BYTES)
        self._take(memoryview(address))
        self._address, self._left = int.from_bytes(address, "little"), message_bytes
        self._words[NUM_READ] += 1
        self._wake_sender()
    num_bytes = cross_memory.read_memory(self._pid, self._address, into[: min(PIECE_BYTES, self._left)])
    if self._hangup.poll(0):
        raise ConnectionError("it closed the connection")
    self._address, self._left = self._address + num_bytes, self._left - num_bytes
    return num_bytes


@mutant(
    target="comm.membership.liveness.cause",
    killer="tests.comm.test_liveness.test_all_survivors_name_the_rank_that_died_and_not_their_own_neighbour",
)
def neighbour_blamed(patience: float = 0.0) -> Departure | None:
    """When a rank dies, each survivor names its own neighbour instead of the rank that died."""
    return None  # no other rank is asked who died


@mutant(
    target="lab.trace.overlap.overlap_of",
    killer="tests.lab.test_overlap.test_a_blocking_all_reduce_inside_the_backward_hides_nothing",
)
def overlap_takes_blocking_for_hidden(events: Sequence[Event]) -> Overlap:
    """The report says that all communication is hidden, though the backward stands still for each all-
    reduce.
    """
    compute = busy([event for event in events if event.lane == MAIN_LANE], COMPUTE)
    communication = busy(events, COMMUNICATION)
    return Overlap(total(compute), total(communication), total(intersection(communication, compute)))


@mutant(
    target="comm.wire.channels.Channels._connect",
    killer=(
        "tests.comm.test_channels."
        "test_all_pairs_are_connected_before_the_first_message_where_connecting_holds_up_the_host"
    ),
)
def pairs_connected_at_the_first_message(self, pairs) -> None:
    """With nccl a pipeline may hang in its first step: ranks connect only when both reach their first
    message.
    """
    pass


@mutant(
    target="comm.membership.liveness.finish",
    killer="tests.comm.test_liveness.test_all_ranks_learn_that_a_rank_has_finished",
)
def rank_leaves_without_notice() -> None:
    """A rank that finishes early is reported as dead by the others, though it ended without an error."""
    pass  # the connection closes, as after a rank's death


@mutant(
    target="lab.units.show_bytes",
    killer="tests.lab.test_units.test_a_size_and_a_rate_are_shown_in_the_unit_that_suits_them",
)
def report_mebibytes_called_megabytes(num_bytes: float) -> str:
    """Reports show powers of 1024 as kB and MB, so traffic looks smaller than it is."""
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1024:.1f} kB" if num_bytes < 1024**2 else f"{num_bytes / 1024**2:.1f} MB"


@mutant(
    target="lab.trace.meter.Meter._tokens_per_second",
    killer="tests.training.test_run.test_tokens_per_second_are_those_of_all_ranks",
    cause="only one of 2 parts",
)
def report_tokens_of_one_rank(self) -> float | None:
    """The report says that two ranks are as fast as one: it counts the tokens per second of one rank only."""
    timed = self._timed()
    return len(timed) * self._tokens_per_step / self._cluster.world_size / sum(timed) if timed else None


@mutant(
    target="comm.transport.memory_ends.MemoryIn._take",
    killer=(
        "tests.comm.test_memory_ends.test_space_in_the_ring_buffer_is_free_only_after_its_bytes_were_copied"
    ),
    symptom="On a busy machine a rank sometimes gets a message in which a part of the next one stands.",
)
def ring_buffer_freed_before_it_is_copied(self, into: memoryview) -> int:
    """A fast sender overwrites what its receiver still copies: the space was called free too early."""
    num_bytes = min(self._words[HEAD] - self._tail, len(into))
    if not num_bytes:
        return 0
    taken = self._tail
    self._tail += num_bytes
    self._words[TAIL] = self._tail
    self._wake_sender()
    read_from_ring(self._ring, taken, into[:num_bytes])
    return num_bytes


@mutant(
    target="comm.transport.memory_ends.write_to_ring",
    killer=(
        "tests.comm.test_memory_ends."
        "test_a_message_that_goes_over_the_end_of_the_ring_buffer_goes_on_at_its_beginning"
    ),
    symptom="Now and then a message between ranks of one machine is wrong from some byte on.",
)
def ring_buffer_wraps_a_byte_too_early(ring: memoryview, position: int, data: memoryview) -> None:
    """Some messages between ranks of one machine are wrong from a byte on: a ring buffer lacks its last
    byte.
    """
    start = position % RING_BYTES
    first = min(len(data), RING_BYTES - 1 - start)
    ring[start : start + first] = data[:first]
    if first < len(data):
        ring[: len(data) - first] = data[first:]


_kept_streams: list[object] = []


@mutant(
    target="comm.transport.streams.Streams.close",
    killer="tests.comm.test_stream_failures.test_mismatches_leave_no_connection_and_no_memory_behind",
)
def ring_never_hangs_up(self: Streams) -> None:
    """A job that catches mismatches and goes on runs out of file descriptors: each mismatch leaves some."""
    _kept_streams.append(self)


@mutant(
    target="comm.transport.segment.fence",
    killer=(
        "tests.comm.test_memory_ends."
        "test_a_rank_makes_its_counter_visible_before_it_looks_whether_the_other_one_sleeps"
    ),
    symptom="On some processors a small message between ranks of one machine now and then takes a second.",
)
def sleeps_without_a_fence() -> None:
    """Two ranks of a machine both sleep, and neither wakes the other: each looks before its store is
    visible.
    """
    _lock.locked()


@mutant(
    target="lab.launch.store.open_store",
    killer="tests.comm.test_rendezvous.test_ranks_started_by_hand_listen_in_the_network_of_the_master_only",
)
def store_open_to_the_network(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Any machine in the network can write to the rendezvous store: it listens on all interfaces."""
    return dist.TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False)


@mutant(
    target="comm.transport.stream_wire.StreamHandshake.finish",
    killer="tests.comm.test_handshake.test_another_dtype_of_the_same_width_is_a_mismatch",
    symptom=(
        "One rank sends integers, the others floats: over gloo that is an error, and over sockets garbage."
    ),
)
def stream_headers_not_compared(self) -> int:
    """Ranks that pass different dtypes get garbage: over streams each gets all headers, and compares none."""
    wire = self._wire
    while True:
        self._arriving.wait()
        self._have += self._count
        if self._have == wire.size:
            break
        self._start_round()
    here = (wire.size - wire.rank) * ROW_BYTES
    rows = bytes(self._rows[here:]) + bytes(self._rows[:here])
    wire.full_numel = self._mine.full
    if self._mine.op in ("scatter", "gather"):
        wire.full_numel = max(Header.unpack(row).full for row in rows_of(rows))
    return max(Header.unpack(row).ready for row in rows_of(rows))


@mutant(
    target="comm.transport.streams.Streams._move",
    killer=(
        "tests.comm.test_progress.test_two_ranks_that_send_each_other_more_than_fits_on_the_way_both_go_on"
    ),
    symptom="Small tensors are right, and with large ones all ranks hang.",
    fails_with="no answer within",
)
def streams_send_before_they_receive(self) -> bool:
    """Two ranks that send each other large tensors hang: each takes nothing until its own send has left."""
    moved = False
    for peer in self._all:
        try:
            if peer.out is not None and peer.out.is_busy and not peer.has_left:
                moved |= peer.out.push()
            else:
                moved |= peer.pull()
        except OSError:
            moved |= not peer.has_left
            peer.has_left = True
    if moved:
        self._deadline = 0.0
    return moved


@mutant(
    target="lab.launch.threads.share_cores",
    killer="tests.comm.test_threads.test_ranks_started_by_hand_share_the_cores_of_their_machine",
)
def threads_of_all_cores(num_ranks: int) -> None:
    """Ranks started by hand take twice as long for a step: each rank uses threads on all cores."""
    pass


@mutant(
    target="lab.check.refuse_unequal",
    killer="tests.lab.test_check.test_unequal_replicas_are_refused_and_the_ranks_named",
    cause="check that must refuse it",
    fails_with="DID NOT RAISE",
)
def unequal_replicas_only_reported(digests: list[str]) -> None:
    """A run whose replicas have drifted apart exits with 0, so the script that started it sees no failure."""
    pass  # "replicas_equal: False" stands in the report


@mutant(
    target="lab.launch.threads.choose_vector_math",
    killer=(
        "tests.comm.test_threads."
        "test_a_rank_calls_the_functions_of_an_optimizer_once_in_one_thread_before_its_first_step"
    ),
)
def vector_math_in_the_first_step() -> None:
    """Sometimes replicas differ after one step: in that step MKL chose its code in two threads at once."""
    pass
