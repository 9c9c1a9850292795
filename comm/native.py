"""Run collectives by torch.distributed, for comparison and for nccl: the pattern "torch".

The messages of torch cannot be counted from outside. So the ledger adds what the best-known algorithm would
send, by its formula, and marks the entry as `by_formula`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from comm import cost
from comm.algorithms.reduction import divisor_before
from comm.errors import CommError
from comm.shards import shards_of
from comm.wire.gloo_wire import GlooWire
from comm.wire.groups import Group, axis_of, peer_trouble
from comm.wire.handshake import SHARDED, Header, exchange_numbers
from comm.wire.staging import In, goes_by_host
from lab.trace import timeline
from lab.trace.ledger import LEDGER

# torch 2.11 has the older names only, which 2.13 deprecates.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Parts = tuple[list[int], list[int]]  # of an all-to-all: the elements from each rank, and to each rank
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class NativeHandle:
    """An operation of torch.distributed in flight, with the interface of comm.wire.work_queue.Handle."""

    def __init__(self, op: str, work: dist.Work | None, finish: Callable[[], None]) -> None:
        self._op, self._work, self._finish = op, work, finish
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def wait(self) -> None:
        """Block until the operation has ended. Raise CommError if a peer has gone, or at the timeout."""
        if self._work is not None:
            with timeline.span("wait", "wait"):
                self.end()

    def end(self) -> None:
        """Do what `wait()` does, but record no span "wait": the caller records the operation itself."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise failed(self._op, error) from error
        self._finish()
        del self._finish  # it holds tensors
        for callback in self._callbacks:
            callback(None)

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def when_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error)` when the operation has ended: on torch's thread, or at once if it has."""
        if self._work is None:
            callback(None)
            return
        try:
            future = self._work.get_future()
        except RuntimeError:  # gloo's reduce-scatter has none: wait() does its last part, and calls back
            self._callbacks.append(callback)
        else:
            future.add_done_callback(lambda future: callback(_error_of(self._op, future)))


def failed(op: str, error: RuntimeError) -> CommError:
    return CommError(f"{op} (torch): rank {dist.get_rank()} gave up: {peer_trouble(str(error), 'a peer')}.")


def _error_of(op: str, future: torch.futures.Future) -> CommError | None:
    try:
        future.value()
    except RuntimeError as error:
        return failed(op, error)
    return None


def start(
    header: Header, group: Group, async_op: bool, buffers: Sequence[In], parts: Parts | None
) -> NativeHandle:
    """Start an operation, and without `async_op` wait for its end."""
    started, lane = timeline.mark(), "communication" if async_op else None
    handle = _launch(header, group, buffers, parts)
    num_bytes = _numel(header, group) * header.dtype.itemsize

    def record(_: object) -> None:
        # nccl calls back at once, but on a stream that waits for the operation.
        how: dict[str, Any] = {"lane": lane, "pattern": "torch", "bytes": num_bytes}
        timeline.record(header.op, "communication", started, timeline.mark(), **how)

    if not async_op:
        handle.end()
        record(None)
    elif timeline.is_recording():
        handle.when_done(record)
    return handle


def run_slowly(
    header: Header, group: Group, sequence: int, ready: int, buffers: Sequence[In], parts: Parts | None
) -> None:
    """Run an operation on a simulated link, which could carry it from the time `ready`."""
    num_bytes = max((buffer.tensor.nbytes for buffer in buffers), default=0)
    op = header.op
    if op == "reduce_scatter" and dist.get_backend(group) == "gloo":
        op = "all_reduce"  # gloo's reduce-scatter is an all-reduce and a slice
    delay = cost.delay_of(op, cost.formula_of(op, "torch"), num_bytes, group, ready)
    if dist.get_backend(group) == "gloo":
        # This message is for the simulated link: on a real one nothing moves before all are ready.
        wire = GlooWire(group, header.op, "torch", sequence, counted=False)
        delay.start(max(exchange_numbers(wire, [delay.ready]))[0])
    _launch(header, group, buffers, parts).end()
    if torch.cuda.is_initialized():  # nccl's wait blocks this thread's stream, not the thread
        torch.cuda.current_stream().synchronize()
    delay.wait()


def _numel(header: Header, group: Group) -> int:
    return header.full or header.shard * dist.get_world_size(group)


def _launch(header: Header, group: Group, buffers: Sequence[In], parts: Parts | None) -> NativeHandle:
    op, rank, n = header.op, dist.get_rank(group), dist.get_world_size(group)
    knows_full = op in ("all_gather", "reduce_scatter") or rank == header.root
    if op in SHARDED and knows_full and header.full != n * header.shard:
        raise CommError(
            f"{op}: pattern 'torch' needs equal shards, but {header.full} elements on {n} ranks are not "
            f"{header.shard} for each; pad the tensor or take another pattern."
        )
    numel, itemsize = _numel(header, group), header.dtype.itemsize
    traffic = cost.traffic(op, "torch", numel, itemsize, n, rank, max(0, header.root))
    if parts is not None:
        traffic = cost.pairwise_traffic(parts[1], itemsize, rank)
    if op != "barrier":
        LEDGER.count(op, "torch", traffic.bytes_sent, traffic.messages_sent, axis_of(group), by_formula=True)
    by_host = any(goes_by_host(buffer.tensor, group) for buffer in buffers)
    flats = [buffer.flat(by_host) for buffer in buffers]

    def finish() -> None:
        for buffer, flat in zip(buffers, flats, strict=True):
            buffer.from_wire(flat)

    try:
        if torch.version.hip is not None:
            _wait_for_other_groups(group)
        work = _call_torch(header, group, flats, parts)
    except RuntimeError as error:
        raise failed(op, error) from error
    if torch.version.hip is not None:
        _previous[:] = [(group, work)]
    return NativeHandle(op, work, finish)


_previous: list[tuple[Group, dist.Work | None]] = []  # the last operation, on AMD's GPUs


def _wait_for_other_groups(group: Group) -> None:
    """Let the stream wait for the last operation if it is of another group: RCCL knows no order of launches.

    Where two operations find room on one GPU in one order and on another GPU in the other, none ends.
    """
    for before, work in _previous:
        if before is not group and work is not None and dist.get_backend(group) == "nccl":
            work.wait()


def _call_torch(header: Header, group: Group, flats: list[Any], parts: Parts | None) -> dist.Work | None:
    root, n = header.root, dist.get_world_size(group)
    how: dict[str, Any] = {"group": group, "async_op": True}
    match header.op:
        case "broadcast":
            return dist.broadcast(flats[0], group_src=root, **how)
        case "scatter":
            shard, full = flats
            parts_of_all = shards_of(full, n) if dist.get_rank(group) == root else None
            return dist.scatter(shard, parts_of_all, group_src=root, **how)
        case "gather":
            full, shard = flats
            parts_of_all = shards_of(full, n) if dist.get_rank(group) == root else None
            return dist.gather(shard, parts_of_all, group_dst=root, **how)
        case "all_gather":
            return all_gather_single(*flats, **how)
        case "all_to_all":
            return dist.all_to_all_single(*flats, *(parts or ()), **how)
        case "barrier":
            # nccl's is an all-reduce on a GPU. Without `device_ids` it would guess the GPU from the rank.
            gpu = [torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else None
            return dist.barrier(device_ids=gpu, **how)
    x = flats[-1]
    how["op"] = _REDUCTIONS[header.reduction]
    if header.op == "reduce" and dist.get_rank(group) != root:
        x = x.clone()  # torch writes partial results to it
    if divisor_before(header.reduction, x.dtype, n) > 1:
        # The sum might overflow. DDP's communication hook waits for the future of torch's sum only, so a
        # division after it would be too late.
        x = x / n if header.op == "reduce_scatter" else x.div_(n)
        how["op"] = dist.ReduceOp.SUM
    match header.op:
        case "reduce":
            return dist.reduce(x, group_dst=root, **how)
        case "reduce_scatter":
            return reduce_scatter_single(flats[0], x, **how)
    return dist.all_reduce(x, **how)
