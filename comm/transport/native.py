"""The same collectives done by torch.distributed itself, for comparison and for nccl.

What torch sends cannot be counted from outside, so the ledger takes the formula of the best-known algorithm
and marks it as `by_formula`. On a container's interface one can see what really moves (comm.tour).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from comm import cost
from comm.algorithms.reduction import divisor_before
from comm.errors import CommError
from comm.shards import shards_of
from comm.transport import slow_link
from comm.transport.gpu_handover import Handover, taken
from comm.transport.handshake import RowExchange
from comm.transport.native_handle import NativeHandle, failed
from comm.transport.staging import goes_by_host
from comm.transport.wire import Group, Wire
from comm.transport.work_queue import Handle, queue_of
from lab import timeline
from lab.ledger import LEDGER

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


Work = Handle | NativeHandle


def broadcast(tensor: torch.Tensor, root: int, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(tensor, group)
    _book("broadcast", flat, group, root)
    return _start(
        "broadcast",
        group,
        flat.nbytes,
        async_op,
        restore,
        lambda: dist.broadcast(flat, group_src=root, group=group, async_op=True),
    )


def scatter(shard: torch.Tensor, full: torch.Tensor | None, root: int, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(shard, group)
    whole, _ = _flat(full, group) if full is not None else (None, None)
    parts = _equal_parts("scatter", whole, flat, group) if whole is not None else None
    _book("scatter", flat, group, root, times=dist.get_world_size(group))
    return _start(
        "scatter",
        group,
        dist.get_world_size(group) * flat.nbytes,
        async_op,
        restore,
        lambda: dist.scatter(flat, parts, group_src=root, group=group, async_op=True),
    )


def gather(shard: torch.Tensor, full: torch.Tensor | None, root: int, group: Group, async_op: bool) -> Work:
    flat, _ = _flat(shard, group)
    whole, restore = _flat(full, group) if full is not None else (None, None)
    parts = _equal_parts("gather", whole, flat, group) if whole is not None else None
    _book("gather", flat, group, root, times=dist.get_world_size(group))
    return _start(
        "gather",
        group,
        dist.get_world_size(group) * flat.nbytes,
        async_op,
        restore,
        lambda: dist.gather(flat, parts, group_dst=root, group=group, async_op=True),
    )


def reduce(tensor: torch.Tensor, op: str, root: int, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(tensor, group)
    if dist.get_rank(group) != root:
        flat, restore = flat.clone(), None  # torch leaves partial results in it
    op = _divide_first(op, flat, group)
    _book("reduce", flat, group, root)
    return _start(
        "reduce",
        group,
        flat.nbytes,
        async_op,
        restore,
        lambda: dist.reduce(flat, group_dst=root, op=_REDUCTIONS[op], group=group, async_op=True),
    )


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: Group, async_op: bool) -> Work:
    flat, _ = _flat(shard, group)
    whole, restore = _flat(full, group)
    _equal_parts("all_gather", whole, flat, group)
    _book("all_gather", whole, group)
    return _start(
        "all_gather",
        group,
        whole.nbytes,
        async_op,
        restore,
        lambda: dist.all_gather_single(whole, flat, group=group, async_op=True),
    )


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, op: str, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(shard, group)
    whole, _ = _flat(full, group)
    _equal_parts("reduce_scatter", whole, flat, group)
    if divisor_before(op, whole.dtype, dist.get_world_size(group)) > 1:
        whole = whole.clone()
        op = _divide_first(op, whole, group)
    _book("reduce_scatter", whole, group)
    return _start(
        "reduce_scatter",
        group,
        whole.nbytes,
        async_op,
        restore,
        lambda: dist.reduce_scatter_single(flat, whole, op=_REDUCTIONS[op], group=group, async_op=True),
    )


def all_reduce(tensor: torch.Tensor, op: str, group: Group, async_op: bool) -> Work:
    flat, restore = _flat(tensor, group)
    op = _divide_first(op, flat, group)
    _book("all_reduce", flat, group)
    return _start(
        "all_reduce",
        group,
        flat.nbytes,
        async_op,
        restore,
        lambda: dist.all_reduce(flat, op=_REDUCTIONS[op], group=group, async_op=True),
    )


def all_to_all(
    output: torch.Tensor,
    full: torch.Tensor,
    out_sizes: list[int],
    in_sizes: list[int],
    group: Group,
    async_op: bool,
) -> Work:
    flat, restore = _flat(output, group)
    whole, _ = _flat(full, group)
    LEDGER.add_formula(
        "all_to_all", "torch", cost.pairwise_traffic(in_sizes, whole.element_size(), dist.get_rank(group))
    )
    return _start(
        "all_to_all",
        group,
        whole.nbytes,
        async_op,
        restore,
        lambda: dist.all_to_all_single(flat, whole, out_sizes, in_sizes, group=group, async_op=True),
    )


def barrier(group: Group, async_op: bool) -> Work:
    # nccl's barrier is an all-reduce, on the GPU that it is told: else it guesses one by the rank.
    gpu = [torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else None
    return _start(
        "barrier", group, 0, async_op, None, lambda: dist.barrier(group, async_op=True, device_ids=gpu)
    )


def _start(
    op: str,
    group: Group,
    num_bytes: int,
    async_op: bool,
    finish: Callable[[], object] | None,
    start: Callable[[], dist.Work | None],
) -> Work:
    if slow_link.current() is not None:
        return _start_slowly(op, group, num_bytes, async_op, finish, start)
    started = timeline.mark()
    try:
        handle = NativeHandle(op, start(), finish)
    except RuntimeError as error:
        raise failed(op, error) from error
    if timeline.is_recording():
        handle.when_done(lambda _: _record(op, num_bytes, started))
    if not async_op:
        handle.wait()
    return handle


def _start_slowly(
    op: str,
    group: Group,
    num_bytes: int,
    async_op: bool,
    finish: Callable[[], object] | None,
    start: Callable[[], dist.Work | None],
) -> Handle:
    """In its turn on the group's communication thread, as ours: a link carries one thing at a time."""
    queue, posted = queue_of(group), timeline.now()
    on_gpu = torch.cuda.is_initialized()
    handover = Handover(torch.device("cuda", torch.cuda.current_device())) if on_gpu else None

    def job(sequence: int) -> None:
        with taken(handover), timeline.span(op, "communication", pattern="torch", bytes=num_bytes):
            ready = posted if handover is None else timeline.now()
            over_gloo = dist.get_backend(group) == "gloo"
            # gloo's reduce-scatter is an all-reduce and a slice (comm.tour shows it), so that is its price.
            charged = "all_reduce" if over_gloo and op == "reduce_scatter" else op
            delay = slow_link.LinkDelay(queue, ready, charged, "torch", num_bytes, dist.get_world_size(group))
            if over_gloo:
                # Not torch's message but the link's: on a real one nothing moves before all are ready.
                wire = Wire(group, op, "torch", sequence, counted=False)
                delay.start(int(RowExchange(wire, torch.tensor([delay.ready])).finish().max()))
            try:
                NativeHandle(op, start(), finish).end()
            except RuntimeError as error:
                raise failed(op, error) from error
            if on_gpu:  # nccl's wait holds up this thread's stream, not the thread
                torch.cuda.current_stream().synchronize()
            delay.wait()

    return queue.submit(job, async_op)


def _record(op: str, num_bytes: int, started: timeline.Moment) -> None:
    # nccl's callback comes at once, but on a stream that waits for the operation.
    ended, lane = timeline.mark(), "communication"
    timeline.record(op, "communication", started, ended, lane=lane, pattern="torch", bytes=num_bytes)


def _divide_first(op: str, flat: torch.Tensor, group: Group) -> str:
    """Divide a tensor whose sum might overflow, as DDP does; returns the reduction that makes it the mean.

    In place and completely: DDP's hook waits for the work's future, which knows of nothing after the sum.
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
            f"{op}: torch's own needs equal shards, but {full.numel()} elements on {n} ranks are not "
            f"{shard.numel()} for each; pad the tensor or take one of our patterns."
        )
    return shards_of(full, n)


def _book(op: str, flat: torch.Tensor, group: Group, root: int = 0, times: int = 1) -> None:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    LEDGER.add_formula(
        op, "torch", cost.traffic(op, "torch", flat.numel() * times, flat.element_size(), n, rank, root)
    )
