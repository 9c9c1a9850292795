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
from comm.transport.stream_wire import StreamWire
from comm.wire.handshake import SHARDED, Header, HeaderExchange, check_parts, wait_until_all_have_read
from comm.wire.slow_link import LinkDelay
from comm.wire.staging import In, handover_of, taken
from comm.wire.wire import Group, Wire, group_of
from comm.wire.work_queue import Handle, queue_of
from lab.trace.timeline import span

Parts = tuple[list[int], list[int]]  # of an all-to-all: the elements from each rank, and to each rank


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

    def job(sequence: int) -> None:
        with taken(handover), span(header.op, "communication", pattern=header.pattern, bytes=num_bytes):
            ready = posted if handover is None else time.perf_counter_ns()
            delay = LinkDelay(
                queue, ready, lambda link: cost.seconds(header.op, header.pattern, num_bytes, ranks, link)
            )
            try:
                mine = dataclasses.replace(header, ready=delay.ready) if delay.ready else header
                wire = _begin(mine, group, sequence, delay, parts)
                tensors = [buffer.to_wire() for buffer in buffers]
                algorithm(wire, *tensors)
                for buffer, tensor in zip(buffers, tensors, strict=True):
                    buffer.from_wire(tensor)
                wire.finish()
            except CommError as error:
                if isinstance(error, Mismatch):
                    wait_until_all_have_read(Wire(group, header.op, header.pattern, sequence))
                streams.forget(group)  # they may be out of step: the next use connects again
                raise
            delay.wait()

    return queue.submit(job, async_op)


def _begin(
    header: Header, group: Group, sequence: int, delay: LinkDelay, parts: Parts | None
) -> Wire | StreamWire:
    """Return the wire of an operation, with the headers on their way. Over gloo they have been compared."""
    transport = chosen_transport(group) if group_of(group).size() > 1 else "gloo"
    wire: Wire | StreamWire
    if transport == "gloo":
        wire = Wire(group, header.op, header.pattern, sequence)
    else:
        wire = StreamWire(group, transport, header.op, header.pattern, sequence)
    headers = HeaderExchange(wire, header)
    wire.set_handshake(lambda: delay.start(headers.finish()))
    # gloo kills a receiver that gets more or fewer bytes than it expects.
    if transport == "gloo" or parts is not None or not _shard_fits(header, wire):
        wire.finish_handshake()
    if parts is not None and not headers.has_even_parts:
        check_parts(wire, *parts)
    return wire


def _shard_fits(header: Header, wire: Wire | StreamWire) -> bool:
    """Return whether this rank's own shard has the right size. If not, the header check will fail."""
    fits = shard_sizes(header.full, wire.size)[wire.rank] == header.shard
    return fits or header.op not in SHARDED or (not header.full and header.op in ("scatter", "gather"))
