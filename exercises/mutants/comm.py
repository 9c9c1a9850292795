"""Wrong implementations of collectives, their algorithms and their gradients."""

import torch
from torch import Tensor
from torch.autograd import Function

from comm.algorithms import tree
from comm.algorithms.hypercube import _fold_in, _fold_out
from comm.algorithms.pairwise import all_to_all
from comm.algorithms.reduction import combine, divide_if_mean
from comm.algorithms.ring import shift
from comm.algorithms.sharded_tree import _block_sizes, _start
from comm.algorithms.tree import family
from comm.collectives import Group, broadcast
from comm.functions import gather_from_ranks, summed
from comm.shards import segments_of, shard_sizes, shards_of
from comm.wire.segment_receiver import SegmentReceiver
from comm.wire.wire import Wire
from exercises.mutants import mutant


@mutant(
    target="comm.algorithms.ring.all_gather",
    killer="tests.comm.test_collectives_by_hand.test_an_all_gather_puts_shards_in_rank_order_on_every_rank",
    cause="wrong order",
)
def all_gather_by_arrival(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Ranks compute with different weights: each puts gathered shards together in the order of arrival."""
    n, r = wire.size, wire.rank
    places = shards_of(full, n)
    places[0].copy_(shard)
    for step in range(1, n):
        arriving = wire.irecv(places[step], (r - 1) % n)
        wire.isend(places[step - 1], (r + 1) % n).wait()
        arriving.wait()


class _Broadcast(Function):
    @staticmethod
    def forward(ctx, x: Tensor, root: int, group: Group) -> Tensor:
        copy = x.clone()
        broadcast(copy, root, group)
        return copy

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


@mutant(
    target="comm.functions.broadcast_from_root",
    killer=(
        "tests.comm.test_functions.test_the_conjugate_of_a_broadcast_is_a_sum_and_that_of_a_sum_a_broadcast"
    ),
)
def broadcast_gradient_not_summed(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """The gradients of the other ranks are lost: the root learns only from its own use of the tensor."""
    return _Broadcast.apply(x, root, group)


@mutant(
    target="comm.algorithms.hypercube.recursive_doubling",
    killer="tests.comm.test_collectives_by_hand.test_an_all_reduce_does_not_change_what_is_still_being_sent",
    symptom="Once in many runs the ranks end an all-reduce with different sums.",
)
def doubling_adds_into_what_is_being_sent(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """Ranks end with different sums: a rank adds into a segment that its partner has not read yet."""
    n = _fold_in(wire, tensor, op)
    if wire.rank < n:
        mine = segments_of(tensor)
        distance = 1
        while distance < n:
            partner = wire.rank ^ distance
            arriving = SegmentReceiver(wire, partner, [len(segment) for segment in mine], tensor.dtype)
            for segment in mine:
                wire.isend(segment, partner)
            for segment, theirs in zip(mine, arriving, strict=True):
                lower, upper = (segment, theirs) if wire.rank < partner else (theirs, segment)
                combine(op, lower, upper, out=segment)
            distance *= 2
        divide_if_mean(op, tensor, wire.size)
    _fold_out(wire, tensor, n)


@mutant(
    target="comm.algorithms.hypercube.recursive_doubling",
    killer="tests.comm.test_narrated.test_recursive_doubling_equals_one_process",
    cause="another partner",
    symptom="Four ranks end with twice the sum of two.",
)
def doubling_meets_the_same_partner(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """Four ranks end with twice the sum of two: each rank has the same partner in all rounds of the
    doubling.
    """
    for _ in range(wire.size.bit_length() - 1):
        partner, theirs = wire.rank ^ 1, torch.empty_like(tensor)
        arriving, leaving = wire.irecv(theirs, partner), wire.isend(tensor, partner)
        arriving.wait()
        leaving.wait()
        combine(op, tensor, theirs, out=tensor)
    divide_if_mean(op, tensor, wire.size)


@mutant(
    target="comm.functions.gather_tokens",
    killer="tests.comm.test_functions.test_cheaper_functions_equal_those_they_are_composed_of",
)
def gather_backward_without_a_sum(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """With sequence parallel gradients are too small: an all-gather's backward leaves out all other ranks."""
    return gather_from_ranks(x, dim, group)


@mutant(
    target="comm.algorithms.hypercube.halving_doubling",
    killer="tests.comm.test_narrated.test_halving_doubling_equals_one_process",
    cause="divided by their number once too often",
)
def halving_divides_each_round(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """Means are too small with halving-doubling: every round divides by the number of ranks."""
    start, end, distance, kept = 0, len(tensor), wire.size // 2, []
    while distance:
        partner, middle = wire.rank ^ distance, (start + end) // 2
        lower, upper = slice(start, middle), slice(middle, end)
        keep, give = (lower, upper) if wire.rank < partner else (upper, lower)
        theirs = torch.empty_like(tensor[keep])
        arriving, leaving = wire.irecv(theirs, partner), wire.isend(tensor[give], partner)
        arriving.wait()
        leaving.wait()
        combine(op, tensor[keep], theirs, out=tensor[keep])
        divide_if_mean(op, tensor[keep], wire.size)
        kept.append((partner, keep, give))
        start, end, distance = keep.start, keep.stop, distance // 2
    for partner, have, lack in reversed(kept):
        arriving, leaving = wire.irecv(tensor[lack], partner), wire.isend(tensor[have], partner)
        arriving.wait()
        leaving.wait()


@mutant(
    target="comm.algorithms.reduction.divide_if_mean",
    killer="tests.comm.test_collectives_by_hand.test_a_mean_is_divided_by_the_number_of_ranks_once",
    cause="divided by 3 once too often",
    symptom="With SGD training on many ranks is slow, and with Adam the loss looks normal.",
)
def mean_divided_twice(op: str, reduced: torch.Tensor, ranks: int) -> None:
    """Gradients are too small by the number of ranks: with SGD training is slow, and Adam hides the error."""
    if op == "mean":
        reduced.div_(ranks)
        reduced.div_(ranks)


@mutant(
    target="comm.algorithms.reduction.divisor_before",
    killer=(
        "tests.comm.test_all_reduce.test_a_mean_of_float16_that_fits_does_not_overflow_though_the_sum_would"
    ),
    cause="overflows to inf",
)
def mean_overflows_in_fp16(op: str, dtype: torch.dtype, ranks: int) -> int:
    """Gradients of an fp16 model are inf where DDP's are finite: ranks add first and divide later."""
    return 1


@mutant(
    target="comm.algorithms.pairwise.all_to_all",
    killer="tests.comm.test_narrated.test_pairwise_all_to_all_equals_one_process",
    symptom="After an all-to-all a part of the result is garbage.",
)
def pairwise_own_part_missing(
    wire: Wire, output: torch.Tensor, full: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
) -> None:
    """Each rank loses its own part of an all-to-all: there is no message for it, and no copy either."""
    outgoing, incoming = full.split(in_sizes), output.split(out_sizes)
    peers = [peer for peer in range(wire.size) if peer != wire.rank]
    arriving = [wire.irecv(incoming[peer], peer) for peer in peers if out_sizes[peer]]
    leaving = [wire.isend(outgoing[peer], peer) for peer in peers if in_sizes[peer]]
    for transfer in arriving + leaving:
        transfer.wait()


@mutant(
    target="comm.algorithms.ring.reduce_scatter",
    killer="tests.comm.test_collectives_by_hand.test_a_reduce_scatter_gives_each_rank_its_own_shard",
    cause="place of its rank",
)
def reduce_scatter_neighbours_shard(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """A sharded optimizer diverges: each rank gets the gradients of its neighbour's shard."""
    n = wire.size
    shards = shards_of(full, n)
    rotated = torch.cat(shards[1:] + shards[:1])  # the loop over ranks begins at 1
    arrived = torch.empty(n * shard.numel(), dtype=shard.dtype)
    all_to_all(wire, arrived, rotated, [shard.numel()] * n, [len(s) for s in shards[1:] + shards[:1]])
    contributions = arrived.view(n, -1)
    shard.copy_(contributions[0])
    for contribution in contributions[1:]:
        combine(op, shard, contribution, out=shard)
    divide_if_mean(op, shard, n)


@mutant(
    target="comm.algorithms.pipelined_ring.chunk_sent",
    killer="tests.comm.test_collectives_by_hand.test_a_ring_all_reduce_adds_up_all_ranks_in_every_chunk",
)
def ring_chunk_off_by_one(rank: int, step: int, n: int) -> int:
    """All-reduced gradients are wrong and differ by rank: the loss is noise, and replicas drift apart."""
    return (rank - step) % n


@mutant(
    target="comm.algorithms.sharded_tree.scatter",
    killer=(
        "tests.comm.test_collectives_by_hand.test_a_tree_scatters_to_each_rank_its_own_shard_from_every_root"
    ),
    cause="Only zeros arrive",
    symptom="After a scatter by tree some ranks have zeros: on two ranks none, on four ranks one.",
)
def sharded_tree_forgets_grandchildren(
    wire: Wire, shard: torch.Tensor, full: torch.Tensor | None, root: int, numel: int
) -> None:
    """Rank 3 of four gets zeros from a scatter: rank 2, which sends to it, was sent its own shard and no
    more.
    """
    parent, children = tree.family(wire, root)
    sizes = _block_sizes(wire, root, numel, len(children))
    if parent is None:
        block = full.roll(-_start(wire, root, numel))
    else:
        block = shard.new_zeros(sum(sizes))
        if shard.numel():
            wire.irecv(block[: shard.numel()], parent).wait()
    own, *parts = block.split(sizes)
    shard.copy_(own)
    shards = shard_sizes(numel, wire.size)
    for child, part in zip(children, reversed(parts), strict=True):
        if shards[child]:
            wire.isend(part[: shards[child]], child).wait()


@mutant(
    target="comm.shards.shard_sizes",
    killer="tests.comm.test_cost.test_a_tensor_is_divided_as_by_tensor_split_and_its_segments_cover_it",
)
def shards_as_chunk_makes_them(numel: int, ranks: int) -> list[int]:
    """With 5 ranks and 6 elements two ranks get nothing: torch.chunk rounds up, so the last shards are
    empty.
    """
    longest = -(-numel // ranks)
    return [min(longest, max(0, numel - rank * longest)) for rank in range(ranks)]


class _SummedBothWays(Function):
    """All-reduces the gradient too. So does torch.distributed.nn, whose ranks may use the sum differently."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


@mutant(
    target="comm.functions.sum_over_ranks",
    killer="tests.comm.test_functions.test_the_backward_of_a_sum_is_the_identity_and_that_of_a_copy_a_sum",
)
def tensor_sum_reduced_again(x: Tensor, group: Group = None) -> Tensor:
    """Gradients below a row layer are n times too large, below two n * n times; Adam hides the error."""
    return _SummedBothWays.apply(x, group)


@mutant(
    target="comm.algorithms.ring.reduce_chunks",
    killer="tests.comm.test_narrated.test_ring_all_reduce_equals_one_process",
)
def textbook_ring_adds_only_the_last_arrival(wire: Wire, chunks: list[torch.Tensor], op: str) -> None:
    """Sums are right on two ranks and too small on more: a chunk has the contributions of two ranks only."""
    n, r = wire.size, wire.rank
    own = [chunk.clone() for chunk in chunks]
    for step in range(n - 1):
        arrived = torch.empty_like(chunks[(r - 2 - step) % n])
        shift(wire, own[(r - 1 - step) % n], arrived)
        combine(op, arrived, own[(r - 2 - step) % n], out=chunks[(r - 2 - step) % n])
    divide_if_mean(op, chunks[r], n)


@mutant(
    target="comm.algorithms.ring.gather_chunks",
    killer="tests.comm.test_narrated.test_ring_all_reduce_equals_one_process",
    symptom="After an all-reduce the ranks have different results.",
)
def textbook_ring_sends_the_wrong_chunk(wire: Wire, chunks: list[torch.Tensor]) -> None:
    """Ranks end with different results: partial sums are passed on, and overwrite the complete chunks."""
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        shift(wire, chunks[(r + 1 + step) % n], chunks[(r + step) % n - 1])


@mutant(
    target="comm.algorithms.tree.reduce",
    killer="tests.comm.test_collectives_by_hand.test_a_reduce_does_not_change_the_other_ranks_tensors",
)
def tree_reduce_in_place(wire: Wire, tensor: torch.Tensor, op: str, root: int) -> None:
    """A reduce to rank 0 overwrites the tensors of the other ranks with partial sums."""
    if tensor.numel() == 0:
        return
    parent, children = family(wire, root)
    for transfer in [wire.irecv(torch.empty_like(tensor), child) for child in reversed(children)]:
        transfer.wait()
        combine(op, tensor, transfer.tensor, out=tensor)
    if parent is not None:
        wire.isend(tensor, parent).wait()
    else:
        divide_if_mean(op, tensor, wire.size)


@mutant(
    target="comm.algorithms.tree.family",
    killer="tests.comm.test_collectives_by_hand.test_a_tree_broadcasts_from_every_root",
    symptom="A broadcast from rank 2 does not send rank 2's tensor.",
)
def tree_root_not_rotated(wire: Wire, root: int) -> tuple[int | None, list[int]]:
    """A broadcast from rank 2 sends rank 0's tensor: a checkpoint that another rank has read is silently
    lost.
    """
    position = wire.rank
    reach = position & -position if position else 1 << (wire.size - 1).bit_length()
    parent = position - reach if position else None
    children = []
    while reach > 1:
        reach //= 2
        if position + reach < wire.size:
            children.append(position + reach)
    return parent, children


@mutant(
    target="comm.algorithms.tree.broadcast",
    killer=(
        "tests.comm.test_collectives_by_hand."
        "test_a_tree_sends_to_the_largest_subtree_first_and_to_one_child_at_a_time"
    ),
    symptom=(
        "A broadcast of a large tensor by tree takes longer than its formula says, on links of one speed."
    ),
)
def tree_sends_to_all_children_at_once(wire: Wire, tensor: torch.Tensor, root: int) -> None:
    """A broadcast by tree is slower than its formula: a rank's messages share its link, and all arrive
    late.
    """
    if tensor.numel() == 0:
        return
    parent, children = family(wire, root)
    if parent is not None:
        wire.irecv(tensor, parent).wait()
    for transfer in [wire.isend(tensor, child) for child in children]:
        transfer.wait()
