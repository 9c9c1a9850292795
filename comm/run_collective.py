"""Run a collective: wait for its turn, exchange headers, bring its tensors to the wire, run its algorithm.

An algorithm is called as `algorithm(wire, *tensors)`. The wire is a StreamWire (shared memory or sockets) or
a Wire (gloo's messages). The tensors are flat and in host memory. The headers are compared before an
algorithm gets its first message, so it may rely on all ranks having called the same operation.
"""

import dataclasses
import time
from collections.abc import Callable

from comm import cost
from comm.errors import CommError, Mismatch
from comm.shards import shard_sizes
from comm.transport import streams
from comm.transport.choice import chosen_transport
from comm.transport.stream_wire import StreamHandshake, StreamWire
from comm.wire.gpu_handover import handover_of, taken
from comm.wire.handshake import (
    SHARDED,
    Header,
    HeaderExchange,
    check_parts,
    wait_until_all_have_read,
)
from comm.wire.slow_link import LinkDelay
from comm.wire.staging import In
from comm.wire.wire import Group, Wire, group_of
from comm.wire.work_queue import GroupQueue, Handle, queue_of
from lab.trace.timeline import span

Parts = tuple[list[int], list[int]]  # of an all-to-all: the elements from each rank, and to each rank

# The first messages of these are segments, and may leave while the headers are in flight.
EAGER_PATTERNS = {
    ("all_gather", "pipelined_ring"),
    ("reduce_scatter", "pipelined_ring"),
    ("all_reduce", "pipelined_ring"),
    ("all_reduce", "recursive_doubling"),
}


def run_collective(
    header: Header,
    group: Group,
    async_op: bool,
    algorithm: Callable[..., None],
    *buffers: In,
    parts: Parts | None = None,
) -> Handle:
    """Run `algorithm` when its turn comes, and return the handle. `header` describes this rank's call.

    `parts` are the sizes of an all-to-all, which are compared too.
    """
    for buffer in buffers:
        if buffer.tensor.dtype != header.dtype:
            raise CommError(
                f"{header.op}: the tensors of one call must have one dtype, not {header.dtype} and "
                f"{buffer.tensor.dtype}."
            )
    num_bytes = max((buffer.tensor.nbytes for buffer in buffers), default=0)
    handover = handover_of(buffer.tensor for buffer in buffers)
    queue, posted = queue_of(group), time.perf_counter_ns()
    ranks = group_of(group).size()

    def run(transport: Wire | StreamWire) -> None:
        wired = [buffer.to_wire() for buffer in buffers]
        algorithm(transport, *wired)
        for buffer, tensor in zip(buffers, wired, strict=True):
            buffer.from_wire(tensor)

    def job(sequence: int) -> None:
        with taken(handover):
            ready = posted if handover is None else time.perf_counter_ns()
            with span(header.op, "communication", pattern=header.pattern, bytes=num_bytes):
                delay = LinkDelay(
                    queue, ready, lambda link: cost.seconds(header.op, header.pattern, num_bytes, ranks, link)
                )
                mine = dataclasses.replace(header, ready=delay.ready) if delay.ready else header
                try:
                    if ranks > 1 and (transport := chosen_transport(group)) != "gloo":
                        _over_streams(transport, mine, group, sequence, delay, run, parts)
                    else:
                        _over_gloo(mine, group, queue, sequence, delay, run, parts)
                except CommError as error:
                    if isinstance(error, Mismatch):
                        wait_until_all_have_read(Wire(group, header.op, header.pattern, sequence))
                    streams.forget(group)  # they may be out of step: the next use connects again
                    raise
                delay.wait()

    return queue.submit(job, async_op)


def _over_streams(
    transport: str,
    header: Header,
    group: Group,
    sequence: int,
    delay: LinkDelay,
    run: Callable[[StreamWire], None],
    parts: Parts | None,
) -> None:
    wire = StreamWire(group, transport, header.op, header.pattern, sequence)
    handshake = StreamHandshake(wire, header)
    wire.set_handshake(lambda: delay.start(handshake.finish()))
    if parts is not None or not _shard_fits(header, wire):
        wire.finish_handshake()
    if parts is not None and not handshake.has_even_parts:
        check_parts(wire, *parts)
    run(wire)
    wire.finish()


def _over_gloo(
    header: Header,
    group: Group,
    queue: GroupQueue,
    sequence: int,
    delay: LinkDelay,
    run: Callable[[Wire], None],
    parts: Parts | None,
) -> None:
    eager = (header.op, header.pattern) in EAGER_PATTERNS and not queue.has_stale_messages
    wire = Wire(group, header.op, header.pattern, sequence, eager)
    headers = HeaderExchange(wire, header)

    def check() -> None:
        try:
            delay.start(headers.finish())
            wire.full_numel = headers.full_numel
        except CommError:
            queue.has_stale_messages = True
            queue.stale_messages.append(wire.eager_transfers)
            raise

    wire.set_handshake(check)
    if not eager or not _shard_fits(header, wire):
        wire.finish_handshake()
    if parts is not None and not headers.has_even_parts:
        check_parts(wire, *parts)
    run(wire)
    wire.finish_handshake()


def _shard_fits(header: Header, wire: Wire | StreamWire) -> bool:
    """Return whether this rank's own shard has the right size. If not, the header check will fail."""
    fits = shard_sizes(header.full, wire.size)[wire.rank] == header.shard
    return fits or header.op not in SHARDED or (not header.full and header.op in ("scatter", "gather"))
