"""Run collectives by torch.distributed, for comparison and for nccl: the pattern "torch".

The messages of torch cannot be counted from outside. So the ledger adds what the best-known algorithm would
send, by its formula, and marks the entry as `by_formula`. In containers comm/tour.py also shows the counter
of the network interface.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from comm import cost
from comm.algorithms.reduction import divisor_before
from comm.errors import CommError
from comm.shards import shards_of
from comm.wire import slow_link
from comm.wire.handshake import exchange_numbers
from comm.wire.staging import Handover, goes_by_host, taken
from comm.wire.wire import Group, Wire, axis_of, peer_trouble
from comm.wire.work_queue import Handle, queue_of
from lab.trace import timeline
from lab.trace.ledger import LEDGER


class NativeHandle:
    """An operation of torch.distributed in flight, with the interface of comm.wire.work_queue.Handle."""

    def __init__(self, op: str, work: dist.Work | None, finish: Callable[[], object] | None = None) -> None:
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
            failure = failed(self._op, error)
            self._call_back(failure)
            raise failure from error
        if self._finish is not None:
            self._finish()
        self._call_back(None)

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def when_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error)` when the operation has ended: on torch's thread, or at once if it has.

        Where torch offers no callback (gloo's reduce-scatter), `wait()` calls it.
        """
        if self._work is None:
            callback(None)
            return
        try:
            future = self._work.get_future()
        except RuntimeError:  # gloo's reduce-scatter has none: wait() does its last part, a slice
            self._callbacks.append(callback)
        else:
            future.add_done_callback(lambda future: callback(_error_of(self._op, future)))

    def _call_back(self, error: BaseException | None) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(error)


def failed(op: str, error: RuntimeError) -> CommError:
    """Return torch's error as a CommError that names this rank and, if known, the peer."""
    if isinstance(error, CommError):
        return error
    return CommError(f"{op} (torch): rank {dist.get_rank()} gave up: {peer_trouble(str(error), 'a peer')}.")


def _error_of(op: str, future: torch.futures.Future) -> CommError | None:
    try:
        future.value()
    except RuntimeError as error:
        return failed(op, error)
    return None


_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
Work = Handle | NativeHandle
Restore = Callable[[], object] | None  # copies a result back to the caller's tensor


def broadcast(tensor: torch.Tensor, root: int, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(tensor, group)
    start = partial(dist.broadcast, flat, group_src=root, group=group)
    return _start("broadcast", flat, group, async_op, start, restore, root)


def scatter(shard: torch.Tensor, full: torch.Tensor | None, root: int, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(shard, group)
    parts = None if full is None else _equal_parts("scatter", _flat(full, group)[0], flat, group)
    start = partial(dist.scatter, flat, parts, group_src=root, group=group)
    return _start("scatter", flat, group, async_op, start, restore, root, is_shard=True)


def gather(shard: torch.Tensor, full: torch.Tensor | None, root: int, group: Group, async_op: bool) -> Work:
    flat, _ = _flat(shard, group)
    parts, restore = None, None
    if full is not None:
        full_flat, restore = _flat(full, group)
        parts = _equal_parts("gather", full_flat, flat, group)
    start = partial(dist.gather, flat, parts, group_dst=root, group=group)
    return _start("gather", flat, group, async_op, start, restore, root, is_shard=True)


def reduce(tensor: torch.Tensor, op: str, root: int, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(tensor, group)
    if dist.get_rank(group) != root:
        flat, restore = flat.clone(), None  # torch writes partial results to it
    reduction = _REDUCTIONS[_divide_first(op, flat, group)]
    start = partial(dist.reduce, flat, group_dst=root, op=reduction, group=group)
    return _start("reduce", flat, group, async_op, start, restore, root)


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: Group, async_op: bool) -> Work:
    flat, _ = _flat(shard, group)
    full_flat, restore = _flat(full, group)
    _equal_parts("all_gather", full_flat, flat, group)
    start = partial(dist.all_gather_single, full_flat, flat, group=group)
    return _start("all_gather", full_flat, group, async_op, start, restore)


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, op: str, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(shard, group)
    full_flat, _ = _flat(full, group)
    _equal_parts("reduce_scatter", full_flat, flat, group)
    if divisor_before(op, full_flat.dtype, dist.get_world_size(group)) > 1:
        full_flat = full_flat.clone()
        op = _divide_first(op, full_flat, group)
    start = partial(dist.reduce_scatter_single, flat, full_flat, op=_REDUCTIONS[op], group=group)
    return _start("reduce_scatter", full_flat, group, async_op, start, restore)


def all_reduce(tensor: torch.Tensor, op: str, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(tensor, group)
    reduction = _REDUCTIONS[_divide_first(op, flat, group)]
    start = partial(dist.all_reduce, flat, op=reduction, group=group)
    return _start("all_reduce", flat, group, async_op, start, restore)


def all_to_all(
    output: torch.Tensor,
    full: torch.Tensor,
    out_sizes: list[int],
    in_sizes: list[int],
    group: Group,
    async_op: bool,
) -> Work:
    flat, restore = _flat(output, group)
    full_flat, _ = _flat(full, group)
    start = partial(dist.all_to_all_single, flat, full_flat, out_sizes, in_sizes, group=group)
    return _start("all_to_all", full_flat, group, async_op, start, restore, in_sizes=in_sizes)


def barrier(group: Group, async_op: bool) -> Work:
    # nccl's barrier is an all-reduce on a GPU. Without `device_ids` it would guess the GPU from the rank.
    gpu = [torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else None
    start = partial(dist.barrier, group, device_ids=gpu)
    return _start("barrier", torch.empty(0), group, async_op, start, None)


def _start(
    op: str,
    flat: torch.Tensor,
    group: Group,
    async_op: bool,
    start: Callable[..., dist.Work | None],
    restore: Restore,
    root: int = 0,
    is_shard: bool = False,
    in_sizes: list[int] | None = None,
) -> Work:
    """Add the formula's traffic to the ledger, and start the operation. `flat` is full, or a rank's shard."""
    rank, n, itemsize = dist.get_rank(group), dist.get_world_size(group), flat.element_size()
    numel = flat.numel() * (n if is_shard else 1)
    if in_sizes is None:
        traffic = cost.traffic(op, "torch", numel, itemsize, n, rank, root)
    else:
        traffic = cost.pairwise_traffic(in_sizes, itemsize, rank)
    if op != "barrier":
        LEDGER.count(op, "torch", traffic.bytes_sent, traffic.messages_sent, axis_of(group), by_formula=True)
    num_bytes, begin = numel * itemsize, partial(start, async_op=True)
    if slow_link.current() is not None:
        return _start_slowly(op, group, num_bytes, async_op, restore, begin)
    started = timeline.mark()
    try:
        handle = NativeHandle(op, begin(), restore)
    except RuntimeError as error:
        raise failed(op, error) from error
    if async_op:
        if timeline.is_recording():
            handle.when_done(lambda _: _record(op, num_bytes, started))
    else:
        handle.end()
        timeline.record(op, "communication", started, timeline.mark(), pattern="torch", bytes=num_bytes)
    return handle


def _start_slowly(
    op: str,
    group: Group,
    num_bytes: int,
    async_op: bool,
    finish: Callable[[], object] | None,
    start: Callable[[], dist.Work | None],
) -> Handle:
    """Run the operation in the group's queue: a simulated link carries one operation at a time."""
    queue, posted = queue_of(group), timeline.now()
    on_gpu = torch.cuda.is_initialized()
    handover = Handover(torch.device("cuda", torch.cuda.current_device())) if on_gpu else None

    def job(sequence: int) -> None:
        with taken(handover), timeline.span(op, "communication", pattern="torch", bytes=num_bytes):
            ready = posted if handover is None else timeline.now()
            over_gloo = dist.get_backend(group) == "gloo"
            # gloo's reduce-scatter is an all-reduce and a slice, and takes the time of an all-reduce.
            charged = "all_reduce" if over_gloo and op == "reduce_scatter" else op
            n, model = dist.get_world_size(group), cost.model_of(charged, "torch")
            delay = slow_link.LinkDelay(
                queue, ready, lambda link: cost.seconds(charged, model, num_bytes, n, link)
            )
            if over_gloo:
                # This message is for the simulated link: on a real one nothing moves before all are ready.
                wire = Wire(group, op, "torch", sequence, counted=False)
                delay.start(max(exchange_numbers(wire, [delay.ready]))[0])
            try:
                NativeHandle(op, start(), finish).end()
            except RuntimeError as error:
                raise failed(op, error) from error
            if on_gpu:  # nccl's wait blocks this thread's stream, not the thread
                torch.cuda.current_stream().synchronize()
            delay.wait()

    return queue.submit(job, async_op)


def _record(op: str, num_bytes: int, started: timeline.Moment) -> None:
    # nccl calls back at once, but on a stream that waits for the operation.
    ended, lane = timeline.mark(), "communication"
    timeline.record(op, "communication", started, ended, lane=lane, pattern="torch", bytes=num_bytes)


def _divide_first(op: str, flat: torch.Tensor, group: Group) -> str:
    """Divide a tensor whose sum might overflow, as DDP does; return the reduction that then gives the mean.

    It divides in place, by the number of ranks, before the sum. DDP's communication hook waits for the future
    of torch's sum only, so a division after it would be too late.
    """
    if divisor_before(op, flat.dtype, dist.get_world_size(group)) == 1:
        return op
    flat.div_(dist.get_world_size(group))
    return "sum"


def _flat(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Return a contiguous flat view, or a flat copy and the function that copies it back."""
    tensor = tensor.detach()
    if goes_by_host(tensor, group):
        tensor, on_gpu = tensor.cpu(), tensor
        flat = tensor.contiguous().view(-1)
        return flat, lambda: on_gpu.copy_(flat.view_as(on_gpu))
    if tensor.is_contiguous():
        return tensor.view(-1), None
    flat = tensor.contiguous().view(-1)
    return flat, lambda: tensor.copy_(flat.view_as(tensor))


def _equal_parts(op: str, full: torch.Tensor, shard: torch.Tensor, group: Group) -> list[torch.Tensor]:
    n = dist.get_world_size(group)
    if full.numel() != n * shard.numel():
        raise CommError(
            f"{op}: pattern 'torch' needs equal shards, but {full.numel()} elements on {n} ranks are not "
            f"{shard.numel()} for each; pad the tensor or take another pattern."
        )
    return shards_of(full, n)
