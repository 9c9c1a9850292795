"""What all collectives of ours go through: the queue of their group, the exchange of headers, the staging.

A pattern comes as `work(path, *tensors)`: the path is a Wire (gloo's messages) or, for "tcp" and "cma", the
group's own ring; the tensors are flat and in host memory. It may rely on the ranks' fitting together.
"""

import dataclasses
import time
from collections.abc import Callable

import torch.distributed as dist

from comm.errors import CommError, Mismatch
from comm.shards import shard_sizes
from comm.transport import sockets
from comm.transport.gpu_handover import handover_of, taken
from comm.transport.handshake import Agreement, Header, wait_until_all_have_read
from comm.transport.slow_link import Toll
from comm.transport.sockets import RingSockets
from comm.transport.staging import In
from comm.transport.wire import Group, Wire
from comm.transport.work_queue import GroupQueue, Handle, queue_of
from lab.timeline import span

RINGS = ("tcp", "cma")  # of our own connections

# Those whose first messages are segments, and may leave while the headers are under way.
EARLY = {
    ("all_gather", "pipelined_ring"),
    ("reduce_scatter", "pipelined_ring"),
    ("all_reduce", "pipelined_ring"),
    ("all_reduce", "recursive_doubling"),
}


def submit(header: Header, group: Group, async_op: bool, work: Callable[..., None], *operands: In) -> Handle:
    """Run `work` in its turn; `header` says what this rank brings. Returns the handle of the operation."""
    for operand in operands:
        if operand.tensor.dtype != header.dtype:
            raise CommError(
                f"{header.op}: the tensors of one call must have one dtype, not {operand.tensor.dtype} too."
            )
    num_bytes = max((operand.tensor.nbytes for operand in operands), default=0)
    handover = handover_of(operand.tensor for operand in operands)
    queue, posted = queue_of(group), time.perf_counter_ns()

    def run(path: Wire | RingSockets) -> None:
        wired = [operand.to_wire() for operand in operands]
        work(path, *wired)
        for operand, tensor in zip(operands, wired, strict=True):
            operand.from_wire(tensor)

    def job(sequence: int) -> None:
        with taken(handover):
            ready = posted if handover is None else time.perf_counter_ns()
            with span(header.op, "communication", pattern=header.pattern, bytes=num_bytes):
                toll = Toll(queue, ready, header.op, header.pattern, num_bytes, dist.get_world_size(group))
                mine = dataclasses.replace(header, ready=toll.ready)
                try:
                    if header.pattern in RINGS:
                        _over_sockets(mine, group, sequence, toll, run)
                    else:
                        _over_gloo(mine, group, queue, sequence, toll, run)
                except Mismatch:
                    wait_until_all_have_read(Wire(group, header.op, header.pattern, sequence))
                    raise
                toll.pay()

    return queue.submit(job, async_op)


def _over_sockets(
    header: Header, group: Group, sequence: int, toll: Toll, run: Callable[[RingSockets], None]
) -> None:
    try:
        ring = sockets.sockets_of(group, header.pattern, header.op, sequence)
        ring.agree(header, toll.begin)
        run(ring)
    except CommError:
        sockets.forget(group, header.pattern)  # the streams may be out of step: the next use connects anew
        raise


def _over_gloo(
    header: Header, group: Group, queue: GroupQueue, sequence: int, toll: Toll, run: Callable[[Wire], None]
) -> None:
    early = (header.op, header.pattern) in EARLY and not queue.has_leftovers
    wire = Wire(group, header.op, header.pattern, sequence, early)
    agreement = Agreement(wire, header)

    def check() -> None:
        try:
            toll.begin(agreement.finish())
        except CommError:
            queue.has_leftovers = True
            queue.leftovers.append(wire.early_transfers)
            raise

    wire.check_before_waiting(check)
    if not early or not _shard_fits(header, wire):
        wire.agree()
    run(wire)
    wire.agree()


def _shard_fits(header: Header, wire: Wire) -> bool:
    """False if this rank's own shard has the wrong size; the agreement will tell everyone."""
    fits = shard_sizes(header.full, wire.size)[wire.rank] == header.shard
    return fits or header.op not in ("all_gather", "reduce_scatter")
