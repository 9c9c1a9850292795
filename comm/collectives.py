"""Run collectives: our own, made of non-blocking sends and receives, or torch.distributed's.

                  before          after                        patterns
  broadcast       root: x         all: x                       tree  flat
  scatter         root: x         rank r: x[r]                 flat  tree
  gather          rank r: x[r]    root: x[0] x[1] x[2]         flat  tree
  reduce          rank r: x(r)    root: x(0) + x(1) + x(2)     tree  flat  pairwise
  all_gather      rank r: x[r]    all: x[0] x[1] x[2]          ring  pipelined_ring  tree  pairwise
                                                               bruck
  reduce_scatter  rank r: x(r)    rank r: part r of the sum    ring  pipelined_ring  tree  pairwise
  all_reduce      rank r: x(r)    all: x(0) + x(1) + x(2)      ring  pipelined_ring  tree  flat
                                                               recursive_doubling  halving_doubling
                                                               pairwise  hierarchical
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
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

import torch
import torch.distributed as dist

from comm import cost, native
from comm.algorithms import (
    bruck,
    hierarchical,
    hypercube,
    pairwise,
    pipelined_ring,
    ring,
    sharded_tree,
    star,
    tree,
)
from comm.algorithms.reduction import check_reduction, divisor_before
from comm.cost import pattern_for
from comm.errors import CommError, Mismatch
from comm.patterns import PATTERNS, chosen_pattern, default_pattern, use_pattern
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
FILES: dict[str, ModuleType] = {  # each has an all_gather, and all but bruck have a reduce_scatter
    "pipelined_ring": pipelined_ring,
    "ring": ring,
    "tree": sharded_tree,
    "pairwise": pairwise,
    "bruck": bruck,
}
ALL_REDUCES = {  # the functions are looked up when they are called, because an exercise may replace them
    "pipelined_ring": (pipelined_ring, "all_reduce"),
    "ring": (ring, "all_reduce"),
    "tree": (tree, "all_reduce"),
    "flat": (star, "all_reduce"),
    "recursive_doubling": (hypercube, "recursive_doubling"),
    "halving_doubling": (hypercube, "halving_doubling"),
    "pairwise": (pairwise, "all_reduce"),
    "hierarchical": (hierarchical, "all_reduce"),
}


def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Copy the root's `tensor` to every rank's. All must have the same number of elements, in any shape."""
    pattern = _choose("broadcast", pattern, group, tensor.nbytes, root)
    header = Header("broadcast", pattern, tensor.dtype, root=root, full=tensor.numel())
    patterns = {"tree": tree.broadcast, "flat": star.broadcast}
    return run_collective(
        header, group, async_op, lambda wire, x: patterns[pattern](wire, x, root), InOut(tensor)
    )


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
    full = _at_root("scatter", full, root, group)
    numel = 0 if full is None else full.numel()
    header = Header("scatter", pattern, shard.dtype, root=root, shard=shard.numel(), full=numel)

    def algorithm(wire: Wire, shard: torch.Tensor, full: torch.Tensor | None = None) -> None:
        if pattern == "flat":
            star.scatter(wire, shard, full, root)
        else:
            wire.finish_handshake()  # it brings `full_numel`, which the root knew
            sharded_tree.scatter(wire, shard, full, root, wire.full_numel)

    buffers = (Out(shard),) if full is None else (Out(shard), In(full))
    return run_collective(header, group, async_op, algorithm, *buffers)


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
    full = _at_root("gather", full, root, group)
    numel = 0 if full is None else full.numel()
    header = Header("gather", pattern, shard.dtype, root=root, shard=shard.numel(), full=numel)

    def algorithm(wire: Wire, shard: torch.Tensor, full: torch.Tensor | None = None) -> None:
        if pattern == "flat":
            star.gather(wire, full, shard, root)
        else:
            wire.finish_handshake()  # it brings `full_numel`, which the root knew
            sharded_tree.gather(wire, full, shard, root, wire.full_numel)

    buffers = (In(shard),) if full is None else (In(shard), Out(full))
    return run_collective(header, group, async_op, algorithm, *buffers)


def reduce(
    tensor: torch.Tensor,
    op: str = "sum",
    root: int = 0,
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Replace the root's `tensor` by the reduction of all ranks'. The other tensors do not change."""
    pattern = _choose("reduce", pattern, group, tensor.nbytes, root)
    check_reduction(op, tensor.dtype)
    patterns = {"tree": tree.reduce, "flat": star.reduce, "pairwise": pairwise.reduce}
    header = Header("reduce", pattern, tensor.dtype, op, root, full=tensor.numel())
    divisor = divisor_before(op, tensor.dtype, group_of(group).size())
    buffer = InOut(tensor, divisor) if dist.get_rank(group) == root else In(tensor, divisor)
    return run_collective(
        header, group, async_op, lambda wire, x: patterns[pattern](wire, x, op, root), buffer
    )


def all_gather(
    full: torch.Tensor,
    shard: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
    unit: int = -1,
) -> Work:
    """Write all shards, in rank order, to each rank's `full`. `shard` may be the rank's part of `full`.

    Ranks must give the same `unit`: a number that tells tensors of equal size apart.
    """
    pattern = _choose("all_gather", pattern, group, full.nbytes)
    header = Header("all_gather", pattern, full.dtype, "none", unit, shard.numel(), full.numel())
    return run_collective(
        header,
        group,
        async_op,
        lambda wire, f, s: FILES[pattern].all_gather(wire, f, s),
        Out(full),
        In(shard),
    )


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
    pattern = _choose("reduce_scatter", pattern, group, full.nbytes)
    check_reduction(op, full.dtype)
    header = Header("reduce_scatter", pattern, full.dtype, op, shard=shard.numel(), full=full.numel())
    buffers = Out(shard), In(full, divisor_before(op, full.dtype, group_of(group).size()))
    return run_collective(
        header, group, async_op, lambda wire, s, f: FILES[pattern].reduce_scatter(wire, s, f, op), *buffers
    )


def all_reduce(
    tensor: torch.Tensor,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
    pattern: str | None = None,
) -> Work:
    """Replace every rank's `tensor` by the reduction of all, bitwise the same on every rank."""
    pattern = _choose("all_reduce", pattern, group, tensor.nbytes)
    check_reduction(op, tensor.dtype)
    header = Header("all_reduce", pattern, tensor.dtype, op, full=tensor.numel())
    buffer = InOut(tensor, divisor_before(op, tensor.dtype, group_of(group).size()))
    return run_collective(
        header, group, async_op, lambda wire, x: getattr(*ALL_REDUCES[pattern])(wire, x, op), buffer
    )


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

    Sizes count the elements of each part, in rank order. Without them the tensors are divided as in
    `comm.shards`. Then the ranks' parts match only if the number of ranks divides the number of elements. The
    pattern bruck needs parts that all have one size, on all ranks.
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

    def algorithm(wire: Wire, out: torch.Tensor, x: torch.Tensor) -> None:
        if pattern == "bruck":
            bruck.all_to_all(wire, out, x)
        else:
            pairwise.all_to_all(wire, out, x, outs, ins)

    return run_collective(header, group, async_op, algorithm, Out(output), In(full), parts=(outs, ins))


def barrier(group: Group = None, async_op: bool = False, pattern: str | None = None) -> Work:
    """Wait until every rank has called this. The exchange of headers (wire/handshake.py) does that."""
    pattern = _choose("barrier", pattern, group, None)
    return run_collective(Header("barrier", pattern, torch.int64), group, async_op, lambda wire: None)


def _choose(op: str, pattern: str | None, group: Group, num_bytes: int | None, root: int = 0) -> str:
    ranks = group_of(group).size()  # raises if there is no group
    if not 0 <= root < ranks:
        raise CommError(f"{op}: root {root} is not a rank of this group of {ranks}.")
    pattern = pattern_for(op, pattern, num_bytes, group)
    if pattern not in ("torch", *PATTERNS[op]):
        names = ", ".join(("auto", "torch", *PATTERNS[op]))
        raise CommError(f"{op} has no pattern {pattern!r}; choose one of {names}.")
    if pattern != "torch" and dist.get_backend(group) == "nccl":
        raise CommError(
            f"{op}: pattern {pattern!r} needs gloo, and this group uses nccl; take 'torch' or BACKEND=gloo."
        )
    return pattern


def _at_root(op: str, full: torch.Tensor | None, root: int, group: Group) -> torch.Tensor | None:
    if dist.get_rank(group) != root:
        return None
    if full is None:
        raise CommError(f"{op}: rank {root} is the root and must pass the full tensor.")
    return full


def run_collective(
    header: Header,
    group: Group,
    async_op: bool,
    algorithm: Callable[..., None],
    *buffers: In,
    parts: native.Parts | None = None,
) -> Work:
    """Run `algorithm(wire, *tensors)`, or torch's own operation, when its turn comes; return the handle.

    The wire is a StreamWire (shared memory or sockets) or a Wire (gloo's messages). The tensors are flat and
    in host memory. `header` describes this rank's call, and `parts` are the sizes of an all-to-all. The ranks
    compare theirs before an algorithm gets its first message, so it may rely on all having called the same.
    """
    for buffer in buffers:
        if buffer.tensor.dtype != header.dtype:
            raise CommError(
                f"{header.op}: the tensors of one call must have one dtype, not {header.dtype} and "
                f"{buffer.tensor.dtype}."
            )
    num_bytes = max((buffer.tensor.nbytes for buffer in buffers), default=0)
    launch = span(header.op, "launch", lane="launches", bytes=num_bytes) if async_op else nullcontext()
    if header.pattern == "torch" and slow_link.current() is None:
        with launch:
            return native.start(header, group, async_op, buffers, parts)
    handover = handover_of(buffer.tensor for buffer in buffers)
    queue, posted = queue_of(group), time.perf_counter_ns()
    ranks = group_of(group).size()

    def seconds_on(link: slow_link.Link) -> float:
        return cost.seconds(*native.charged(header, group), num_bytes, ranks, link)

    def job(sequence: int) -> None:
        how = {"pattern": header.pattern, "bytes": num_bytes}
        with handover or nullcontext(), span(header.op, "communication", **how):
            delay = LinkDelay(queue, posted if handover is None else time.perf_counter_ns(), seconds_on)
            if header.pattern == "torch":
                native.run_slowly(header, group, sequence, delay, buffers, parts)
            else:
                run(sequence, delay)
            delay.wait()

    def run(sequence: int, delay: LinkDelay) -> None:
        try:
            mine = header._replace(ready=delay.ready) if delay.ready else header
            wire = _begin(mine, group, sequence, delay, parts)
            tensors = [buffer.to_wire() for buffer in buffers]
            algorithm(wire, *tensors)
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.from_wire(tensor)
            wire.finish()
        except CommError as error:
            if isinstance(error, Mismatch):
                wait_until_all_have_read(GlooWire(group, header.op, header.pattern, sequence))
            streams.forget(group)  # they may be out of step: the next use connects again
            raise

    with launch:
        return queue.submit(job, async_op)


def _begin(header: Header, group: Group, sequence: int, delay: LinkDelay, parts: native.Parts | None) -> Wire:
    """Return the wire of an operation, with the headers on their way. Over gloo they have been compared."""
    transport = chosen_transport() if group_of(group).size() > 1 else "gloo"
    if transport == "gloo":
        wire: Wire = GlooWire(group, header.op, header.pattern, sequence)
    else:
        wire = StreamWire(group, transport, header.op, header.pattern, sequence)
    headers = HeaderExchange(wire, header)
    wire.check = lambda: delay.start(headers.finish())
    # gloo kills a receiver that gets more or fewer bytes than it expects.
    if transport == "gloo" or parts is not None or not _shard_fits(header, wire):
        wire.finish_handshake()
    if parts is not None and not headers.has_even_parts:
        check_parts(wire, *parts)
    return wire


def _shard_fits(header: Header, wire: Wire) -> bool:
    """Return whether this rank's own shard has the right size. If not, the header check will fail."""
    fits = shard_sizes(header.full, wire.size)[wire.rank] == header.shard
    return fits or header.op not in SHARDED or (not header.full and header.op in ("scatter", "gather"))
