"""Run collectives: our own, made of non-blocking sends and receives, or torch.distributed's.

                  before          after                        patterns
  broadcast       root: x         all: x                       tree  flat
  scatter         root: x         rank r: x[r]                 flat
  gather          rank r: x[r]    root: x[0] x[1] x[2]         flat
  reduce          rank r: x(r)    root: x(0) + x(1) + x(2)     tree  flat
  all_gather      rank r: x[r]    all: x[0] x[1] x[2]          ring  pipelined_ring  tree  bruck
  reduce_scatter  rank r: x(r)    rank r: part r of the sum    ring  pipelined_ring  tree
  all_reduce      rank r: x(r)    all: x(0) + x(1) + x(2)      ring  pipelined_ring  tree  flat
                                                               recursive_doubling  halving_doubling
                                                               hierarchical
  all_to_all      rank r: x(r)    rank r: part r of each x     pairwise  bruck
  barrier                         no rank leaves before all have arrived

x(r) is a tensor of rank r, and x[r] is part r of x. A pattern is an algorithm: it says which rank sends what
to which (comm/algorithms/). How the messages travel is the transport of the group: shared memory, sockets or
gloo (wire/transport.py). `pattern=None` means the pattern that `use_pattern` has chosen for the group. If
none is chosen, it means the first one listed, or in a group that uses nccl "torch": torch.distributed's own
collectives. "auto" takes the pattern that is predicted to be fastest (cost.fastest).

Each function returns a handle. With `async_op=True` it returns at once, and `handle.wait()` waits until the
operation ends: do not touch its tensors before. `root` is a rank of `group`. `op` is "sum", "mean", "max",
"min" or "product". A full tensor is divided among the ranks as `comm.shards` says, so any size is allowed;
"torch" needs equal shards. All errors are CommErrors. If the ranks' calls do not fit together, all ranks
raise the same one; with "torch" a rank can only check its own tensors.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from comm import cost, native
from comm.algorithms.reduction import check_reduction, divisor_before
from comm.cost import pattern_for
from comm.errors import CommError, Mismatch
from comm.patterns import ALGORITHMS, PATTERNS, chosen_pattern, default_pattern, use_pattern
from comm.shards import shard_sizes
from comm.wire import slow_link, streams
from comm.wire.gloo_wire import GlooWire
from comm.wire.groups import Group, group_of
from comm.wire.handshake import SHARDED, UNEVEN, Header, HeaderExchange, check_parts, wait_until_all_have_read
from comm.wire.slow_link import LinkDelay
from comm.wire.staging import In, InOut, Out, handover_of
from comm.wire.stream_wire import StreamWire
from comm.wire.transport import chosen_transport
from comm.wire.wire import Wire
from comm.wire.work_queue import Handle, queue_of
from lab.trace.timeline import span

__all__ = ["PATTERNS", "chosen_pattern", "default_pattern", "pattern_for", "use_pattern"]

Work = Handle | native.NativeHandle


def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Copy the root's `tensor` to every rank's. All must have the same number of elements, in any shape."""
    pattern = _choose("broadcast", pattern, group, tensor, root)
    header = Header("broadcast", pattern, tensor.dtype, root=root, full=tensor.numel())
    return run_collective(header, group, async_op, [InOut(tensor)], root)


def scatter(
    shard: torch.Tensor,
    full: torch.Tensor | None = None,
    root: int = 0,
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Write to each rank's `shard` its part of the root's `full`. The other ranks' `full` is ignored."""
    pattern = _choose("scatter", pattern, group, None, root)
    full = _at_root("scatter", full, shard, root, group)
    header = Header("scatter", pattern, shard.dtype, root=root, shard=shard.numel(), full=full.numel())
    return run_collective(header, group, async_op, [Out(shard), In(full)], root)


def gather(
    shard: torch.Tensor,
    full: torch.Tensor | None = None,
    root: int = 0,
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Write the shards of all ranks, in rank order, to the root's `full`. The others' `full` is ignored."""
    pattern = _choose("gather", pattern, group, None, root)
    full = _at_root("gather", full, shard, root, group)
    header = Header("gather", pattern, shard.dtype, root=root, shard=shard.numel(), full=full.numel())
    return run_collective(header, group, async_op, [Out(full), In(shard)], root)


def reduce(
    tensor: torch.Tensor,
    op: str = "sum",
    root: int = 0,
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Replace the root's `tensor` by the reduction of all ranks'. The other tensors do not change."""
    pattern = _choose("reduce", pattern, group, tensor, root)
    check_reduction(op, tensor.dtype)
    header = Header("reduce", pattern, tensor.dtype, op, root, full=tensor.numel())
    divisor = divisor_before(op, tensor.dtype, group_of(group).size())
    buffer = InOut(tensor, divisor) if dist.get_rank(group) == root else In(tensor, divisor)
    return run_collective(header, group, async_op, [buffer], op, root)


def all_gather(
    full: torch.Tensor,
    shard: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
    tensor_id: int = -1,
) -> Work:
    """Write all shards, in rank order, to each rank's `full`. `shard` may be the rank's part of `full`.

    Ranks must give the same `tensor_id`: a number that tells tensors of equal size apart.
    """
    pattern = _choose("all_gather", pattern, group, full)
    header = Header("all_gather", pattern, full.dtype, "none", tensor_id, shard.numel(), full.numel())
    return run_collective(header, group, async_op, [Out(full), In(shard)])


def reduce_scatter(
    shard: torch.Tensor,
    full: torch.Tensor,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Write this rank's part of the reduction of all ranks' `full` to `shard`.

    `full` does not change, except where `shard` is the rank's part of it.
    """
    pattern = _choose("reduce_scatter", pattern, group, full)
    check_reduction(op, full.dtype)
    header = Header("reduce_scatter", pattern, full.dtype, op, shard=shard.numel(), full=full.numel())
    divisor = divisor_before(op, full.dtype, group_of(group).size())
    return run_collective(header, group, async_op, [Out(shard), In(full, divisor)], op)


def all_reduce(
    tensor: torch.Tensor,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Replace every rank's `tensor` by the reduction of all, bitwise the same on every rank."""
    pattern = _choose("all_reduce", pattern, group, tensor)
    check_reduction(op, tensor.dtype)
    header = Header("all_reduce", pattern, tensor.dtype, op, full=tensor.numel())
    divisor = divisor_before(op, tensor.dtype, group_of(group).size())
    return run_collective(header, group, async_op, [InOut(tensor, divisor)], op)


def all_to_all(
    output: torch.Tensor,
    full: torch.Tensor,
    output_sizes: list[int] | None = None,
    input_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Send part p of `full` to rank p, and receive part p of `output` from rank p.

    Sizes count the elements of each part, in rank order. Without sizes the tensors are divided as in
    `comm.shards`, and the number of ranks must divide the number of elements: else two ranks would expect
    different sizes of one part. The pattern bruck needs parts that all have one size, on all ranks.
    """
    pattern = _choose("all_to_all", pattern, group, None)
    n = dist.get_world_size(group)
    outs = output_sizes if output_sizes is not None else shard_sizes(output.numel(), n)
    ins = input_sizes if input_sizes is not None else shard_sizes(full.numel(), n)
    for name, sizes, tensor in (("output", outs, output), ("input", ins, full)):
        if len(sizes) != n or sum(sizes) != tensor.numel():
            raise CommError(
                f"all_to_all: {name}_sizes {sizes} do not divide {tensor.numel()} elements into {n} parts."
            )
    is_even = len({*outs, *ins}) == 1
    header = Header("all_to_all", pattern, full.dtype, shard=ins[0] if is_even else UNEVEN, full=full.numel())
    arguments = () if pattern == "bruck" else (outs, ins)  # bruck's parts have one size
    return run_collective(header, group, async_op, [Out(output), In(full)], *arguments, parts=(outs, ins))


def barrier(group: Group = None, async_op: bool = False, pattern: str | None = None) -> Work:
    """Wait until every rank has called this. The exchange of headers (wire/handshake.py) does that."""
    pattern = _choose("barrier", pattern, group, None)
    return run_collective(Header("barrier", pattern, torch.int64), group, async_op, [])


def _choose(op: str, pattern: str | None, group: Group, tensor: torch.Tensor | None, root: int = 0) -> str:
    """Return the pattern to use; "auto" chooses it by the size of `tensor`."""
    if tensor is not None and tensor.layout != torch.strided:
        raise CommError(f"{op}: a sparse tensor may have another size on each rank; call to_dense() first.")
    ranks = group_of(group).size()  # raises if there is no group
    if not 0 <= root < ranks:
        raise CommError(f"{op}: root {root} is not a rank of this group of {ranks}.")
    pattern = pattern_for(op, pattern, None if tensor is None else tensor.nbytes, group)
    if pattern not in ("torch", *PATTERNS[op]):
        names = ", ".join(("auto", "torch", *PATTERNS[op]))
        raise CommError(f"{op} has no pattern {pattern!r}; choose one of {names}.")
    if pattern != "torch" and dist.get_backend(group) == "nccl":
        raise CommError(
            f"{op}: pattern {pattern!r} needs gloo, and this group uses nccl; take 'torch' or BACKEND=gloo."
        )
    return pattern


def _at_root(
    op: str, full: torch.Tensor | None, shard: torch.Tensor, root: int, group: Group
) -> torch.Tensor:
    """Return the root's `full`, and on the other ranks a tensor without elements."""
    if dist.get_rank(group) != root:
        return shard.new_empty(0)
    if full is None:
        raise CommError(f"{op}: rank {root} is the root and must pass the full tensor.")
    return full


def run_collective(
    header: Header,
    group: Group,
    async_op: bool,
    buffers: Sequence[In],
    *arguments: object,
    parts: native.Parts | None = None,
) -> Work:
    """Run an algorithm, or torch's own operation, when its turn comes; return the handle.

    `header` describes this rank's call, and names the algorithm. It is called with a wire, with the tensors
    of `buffers`, flat and in host memory, and with `arguments`. `parts` are the sizes of an all-to-all.
    """
    check_dtypes(header, buffers)
    num_bytes = max((buffer.tensor.nbytes for buffer in buffers), default=0)
    with span(header.op, "launch", lane="launches", bytes=num_bytes) if async_op else nullcontext():
        if header.pattern == "torch" and slow_link.current() is None:
            return native.start(header, group, async_op, buffers, parts)
        handover, posted = handover_of(buffer.tensor for buffer in buffers), time.perf_counter_ns()

        def take_turn(sequence: int) -> None:
            how = {"pattern": header.pattern, "bytes": num_bytes}
            with handover or nullcontext(), span(header.op, "communication", **how):
                ready = posted if handover is None else time.perf_counter_ns()
                if header.pattern == "torch":  # on a simulated link, which carries one operation at a time
                    native.run_slowly(header, group, sequence, ready, buffers, parts)
                    return
                delay = cost.delay_of(header.op, header.pattern, num_bytes, group, ready)
                with opened(header, group, sequence, delay, parts) as wire:
                    tensors = [buffer.to_wire() for buffer in buffers]
                    ALGORITHMS[header.op][header.pattern](wire, *tensors, *arguments)
                    for buffer, tensor in zip(buffers, tensors, strict=True):
                        buffer.from_wire(tensor)
                delay.wait()

        return queue_of(group).submit(take_turn, async_op)


def check_dtypes(header: Header, buffers: Sequence[In]) -> None:
    """Raise CommError unless all tensors of a call have one dtype."""
    for buffer in buffers:
        if buffer.tensor.dtype != header.dtype:
            raise CommError(
                f"{header.op}: the tensors of one call must have one dtype, not {header.dtype} and "
                f"{buffer.tensor.dtype}."
            )


@contextmanager
def opened(
    header: Header, group: Group, sequence: int, delay: LinkDelay, parts: native.Parts | None
) -> Iterator[Wire]:
    """Open the wire of an operation: a GlooWire, or a StreamWire over shared memory or sockets.

    The ranks compare their headers before an algorithm gets its first message, so it may rely on all having
    called the same. Over gloo they have done so here.
    """
    transport = chosen_transport() if group_of(group).size() > 1 else "gloo"
    try:
        if transport == "gloo":
            wire: Wire = GlooWire(group, header.op, header.pattern, sequence)
        else:
            wire = StreamWire(group, transport, header.op, header.pattern, sequence)
        headers = HeaderExchange(wire, header._replace(ready=delay.ready) if delay.ready else header)
        wire.check = lambda: delay.start(headers.finish())
        # gloo kills a receiver that gets more or fewer bytes than it expects.
        if transport == "gloo" or parts is not None or not _shard_fits(header, wire):
            wire.finish_handshake()
        if parts is not None and not headers.has_even_parts:
            check_parts(wire, *parts)
        yield wire
        wire.finish()
    except CommError as error:
        if isinstance(error, Mismatch):
            wait_until_all_have_read(GlooWire(group, header.op, header.pattern, sequence))
        streams.forget(group)  # they may be out of step: the next use connects again
        raise


def _shard_fits(header: Header, wire: Wire) -> bool:
    """Return whether this rank's own shard has the right size. If not, the header check will fail."""
    fits = shard_sizes(header.full, wire.size)[wire.rank] == header.shard
    return fits or header.op not in SHARDED or (not header.full and header.op in ("scatter", "gather"))
