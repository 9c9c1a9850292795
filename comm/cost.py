"""Compute the cost of a collective: the bytes and messages that each rank sends, and the predicted time.

A message of b bytes takes alpha + b * beta seconds: alpha is the latency of a message, beta the time of a
byte (Hockney's model, 1994; for collectives: Thakur, Rabenseifner and Gropp, 2005). The arithmetic of a
reduction is left out, because on a network it takes less time than the transfer of the bytes.

`seconds` has the formula of each pattern. The table in comm/README.md adds messages and bytes, and says which
formulas hold for a power of two only.
"""

from collections.abc import Sequence

import torch.distributed as dist

from comm.algorithms.hierarchical import ranks_by_host
from comm.patterns import PATTERNS, chosen_pattern, default_pattern, link_of
from comm.shards import SEGMENT_BYTES, shard_sizes
from comm.wire.gloo_wire import peer_wire
from comm.wire.groups import Group, group_of
from comm.wire.handshake import ROW_BYTES
from comm.wire.hosts import hosts_of
from comm.wire.slow_link import Link, LinkDelay, link_for
from comm.wire.work_queue import queue_of
from lab.trace.ledger import Traffic

Hosts = Sequence[int]  # the number of each rank's host; empty if all share one


def header_traffic(ranks: int, uneven_parts: bool = False) -> Traffic:
    """Return what a rank sends as headers in one collective. The size of the tensors does not matter.

    `uneven_parts` says that it is an all-to-all whose parts have different sizes.
    """
    traffic = Traffic((ranks - 1) * ROW_BYTES, _log2_up(ranks))
    if uneven_parts:  # a second exchange: each rank's `output_sizes` and `input_sizes`
        traffic += Traffic((ranks - 1) * 2 * ranks * 8, _log2_up(ranks))
    return traffic


def traffic(
    op: str, pattern: str, numel: int, itemsize: int, ranks: int, rank: int, root: int = 0, hosts: Hosts = ()
) -> Traffic:
    """Return the exact payload that `rank` sends. `numel` counts the full tensor: all shards together.

    For the pattern "torch" it is the payload of the best-known algorithm, see `formula_of`. `hosts` counts
    for the pattern "hierarchical" only.
    """
    pattern = formula_of(op, pattern)
    sizes = shard_sizes(numel, ranks)
    position = (rank - root) % ranks

    def full(times: int) -> Traffic:
        return Traffic(times * numel * itemsize, times) if numel else Traffic()

    def shards(which: list[int], segmented: bool) -> Traffic:
        per_message = max(1, SEGMENT_BYTES // itemsize)
        messages = [-(-sizes[s] // per_message) if segmented else min(1, sizes[s]) for s in which]
        return Traffic(sum(sizes[s] for s in which) * itemsize, sum(messages))

    def blocks(positions: list[int]) -> Traffic:
        """Return one message for each position: the shards of its subtree."""
        numels = [sum(sizes[p : p + (p & -p)]) for p in positions]
        return Traffic(sum(numels) * itemsize, sum(size > 0 for size in numels))

    others = [r for r in range(ranks) if r != rank]
    not_the_rights = [r for r in range(ranks) if r != (rank + 1) % ranks]
    match op, pattern:
        case "barrier", _:
            return Traffic()
        case "broadcast", "flat":
            return full(ranks - 1 if position == 0 else 0)
        case "broadcast", "tree":
            return full(_num_children(position, ranks))
        case "reduce", "flat" | "tree":
            return full(0 if position == 0 else 1)
        case "scatter", "flat":
            return shards(others, False) if position == 0 else Traffic()
        case "gather", "flat":
            return shards([rank], False) if position != 0 else Traffic()
        case "reduce_scatter", "ring" | "pipelined_ring":
            return shards(others, pattern != "ring")
        case "all_gather", "ring" | "pipelined_ring":
            return shards(not_the_rights, pattern == "pipelined_ring") if ranks > 1 else Traffic()
        case "all_gather", "tree":  # a gather to rank 0, and a broadcast
            return blocks([rank] if rank else []) + full(_num_children(rank, ranks))
        case "reduce_scatter", "tree":  # a reduce to rank 0, and a scatter
            children = [rank + (1 << i) for i in range(_num_children(rank, ranks))]
            return full(1 if rank else 0) + blocks(children)
        case "all_gather", "bruck":
            counts = [min(1 << i, ranks - (1 << i)) for i in range(_log2_up(ranks))]
            numels = [sum((sizes + sizes)[rank : rank + count]) for count in counts]
            return Traffic(sum(numels) * itemsize, sum(size > 0 for size in numels))
        case "all_to_all", "bruck":
            # A part is sent as often as its distance has the binary digit 1.
            moved = sum(distance.bit_count() for distance in range(ranks)) if numel else 0
            return Traffic(moved * (numel // ranks) * itemsize, _log2_up(ranks) if numel else 0)
        case "all_to_all", "pairwise":
            return pairwise_traffic(sizes, itemsize, rank)
        case "all_reduce", "ring" | "pipelined_ring":
            chunks = others + (not_the_rights if ranks > 1 else [])
            return shards(chunks, pattern == "pipelined_ring")
        case "all_reduce", "flat":
            return full(ranks - 1 if rank == 0 else 1)
        case "all_reduce", "tree":
            return full((0 if rank == 0 else 1) + _num_children(rank, ranks))
        case "all_reduce", "recursive_doubling":
            power = 1 << (ranks.bit_length() - 1)
            times = 1 if rank >= power else _log2_up(power) + (rank + power < ranks)
            return Traffic(times * numel * itemsize, times * _num_segments(numel, itemsize))
        case "all_reduce", "hierarchical":
            return _hierarchical(numel, itemsize, hosts or [0] * ranks, rank)
        case "all_reduce", "halving_doubling":
            return _halving_doubling(numel, itemsize, ranks, rank)
    raise ValueError(f"There is no formula for {op} with pattern {pattern!r}.")


def expected_traffic(
    op: str, pattern: str | None, numel: int, itemsize: int, group: Group = None, root: int = 0
) -> Traffic:
    """Return the bytes and messages that the ledger will show on this rank for a collective of the group.

    `numel` counts the full tensor. `pattern` is what the collective is called with, also None or "auto". For
    "auto" and "hierarchical" all ranks must call it.
    """
    chosen = pattern_for(op, pattern, numel * itemsize, group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    hosts = hosts_of(peer_wire(group)) if chosen == "hierarchical" else ()
    return traffic(op, chosen, numel, itemsize, ranks, rank, root, hosts)


def seconds(op: str, pattern: str, num_bytes: int, ranks: int, link: Link) -> float:
    """Return the predicted seconds of a collective, headers included. The full tensor has `num_bytes`."""
    n, b, log = ranks, num_bytes * link.beta, _log2_up(ranks)
    a = link.alpha
    if n == 1:
        return 0.0
    if pattern == "pipelined_ring":
        pattern = "ring"
    # The two doublings work on a power of two: the other ranks send their tensors before, and get sums after.
    power = 1 << (n.bit_length() - 1)
    log_power, folds = power.bit_length() - 1, 0 if power == n else 2
    predicted = {
        ("barrier", "tree"): 0.0,
        ("broadcast", "flat"): a + (n - 1) * b,
        ("broadcast", "tree"): log * (a + b),
        ("reduce", "flat"): a + (n - 1) * b,
        ("reduce", "tree"): log * (a + b),
        ("scatter", "flat"): a + (n - 1) / n * b,
        ("gather", "flat"): a + (n - 1) / n * b,
        ("all_gather", "ring"): (n - 1) * (a + b / n),
        ("all_gather", "bruck"): log * a + (n - 1) / n * b,
        ("all_gather", "tree"): 2 * log * a + (log + (n - 1) / n) * b,
        ("reduce_scatter", "ring"): (n - 1) * (a + b / n),
        ("reduce_scatter", "tree"): 2 * log * a + (log + (n - 1) / n) * b,
        ("all_reduce", "ring"): 2 * (n - 1) * (a + b / n),
        ("all_reduce", "flat"): 2 * (a + (n - 1) * b),
        ("all_reduce", "tree"): 2 * log * (a + b),
        ("all_reduce", "recursive_doubling"): (log_power + folds) * (a + b),
        ("all_reduce", "halving_doubling"): 2 * log_power * a + 2 * (power - 1) / power * b + folds * (a + b),
        ("all_reduce", "hierarchical"): 2 * (n - 1) * (a + b / n),  # on one host
        ("all_to_all", "bruck"): log * a + sum(distance.bit_count() for distance in range(n)) / n * b,
        ("all_to_all", "pairwise"): (n - 1) * a + (n - 1) / n * b,
    }
    if (op, pattern) not in predicted:
        raise ValueError(f"There is no formula for {op} with pattern {pattern!r}.")
    return predicted[op, pattern] + log * a  # the headers


def hierarchical_seconds(num_bytes: int, ranks: int, hosts: int, inner: Link, outer: Link) -> float:
    """Return the predicted seconds of the pattern "hierarchical" with equally many ranks on each host.

    `inner` is the link of two ranks of a host, and `outer` that of a host, which its ranks share.
    """
    within = seconds("all_reduce", "ring", num_bytes, ranks // hosts, inner)
    return within + seconds("all_reduce", "ring", num_bytes, hosts, outer)


def seconds_of_trees(op: str, num_bytes: int, ranks: int, nodes: int, inner: Link, outer: Link) -> float:
    """Return the predicted seconds of an all-reduce, all-gather or reduce-scatter of NCCL.

    NCCL has rings and trees, which send as many bytes, and takes the faster one. The latency of trees grows
    with the logarithm of the ranks of a node, and of the nodes. `outer.beta` is that of the ring. Double
    binary trees: Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan", Parallel Computing, 2009.
    """
    times = 2 if op == "all_reduce" else 1  # a reduction and a broadcast
    rounds = _log2_up(-(-ranks // nodes)) * inner.alpha + _log2_up(nodes) * outer.alpha
    trees = times * (rounds + (ranks - 1) / ranks * num_bytes * outer.beta)
    return min(trees, seconds(op, "ring", num_bytes, ranks, outer))


def delay_of(op: str, pattern: str, num_bytes: int, group: Group, posted: int) -> LinkDelay:
    """Return the delay that the simulated link adds to a collective that was posted at this time."""
    queue = queue_of(group)
    link = link_for(queue)
    took = 0.0 if link is None else seconds(op, pattern, num_bytes, group_of(group).size(), link)
    return LinkDelay(queue, posted, took)


def pattern_for(op: str, pattern: str | None, num_bytes: int | None, group: Group = None) -> str:
    """Return the pattern that None or "auto" stands for: None is what the group has chosen (patterns.py).

    "auto" depends on the bytes of the full tensor; without `num_bytes` it is the default. All ranks must call
    it for "auto".
    """
    pattern = chosen_pattern(op, group) if pattern is None else pattern
    if pattern == "auto" and dist.get_backend(group) == "nccl":
        return default_pattern(op, group)
    # What all ranks choose must not depend on what only one of them knows: the sizes of its own parts.
    is_known_to_all = op not in ("scatter", "gather", "all_to_all")
    return fastest(op, num_bytes if is_known_to_all else None, group) if pattern == "auto" else pattern


def fastest(op: str, num_bytes: int | None, group: Group = None) -> str:
    """Return the pattern that is predicted to be fastest in this group. All ranks must call it.

    The group's alpha and beta are measured at the first call (patterns.py); on several hosts also those
    within a host. Of patterns that differ by less than 5% it takes a ring in segments, which adds while
    messages travel, or else the first one listed.
    """
    ranks = dist.get_world_size(group)
    if num_bytes is None or ranks == 1 or len(PATTERNS[op]) == 1:
        return PATTERNS[op][0]
    link = link_of(group)
    predicted = {pattern: seconds(op, pattern, num_bytes, ranks, link) for pattern in PATTERNS[op]}
    if predicted.pop("hierarchical", None) is not None:
        by_host = ranks_by_host(hosts_of(peer_wire(group)))
        own_host = next(of_host for of_host in by_host if dist.get_rank(group) in of_host)
        if len(by_host) > 1 and all(len(of_host) == len(own_host) for of_host in by_host):
            links = link_of(group, own_host), link
            predicted["hierarchical"] = hierarchical_seconds(num_bytes, ranks, len(by_host), *links)
    good = [pattern for pattern, took in predicted.items() if took <= 1.05 * min(predicted.values())]
    return "pipelined_ring" if "pipelined_ring" in good else good[0]


def formula_of(op: str, pattern: str) -> str:
    """Return the pattern whose formulas apply: for "torch" the best-known one, else `pattern` itself."""
    if pattern != "torch":
        return pattern
    best = {"broadcast": "tree", "reduce": "tree", "scatter": "flat", "gather": "flat"}
    return (best | {"all_to_all": "pairwise", "barrier": "tree"}).get(op, "ring")


def pairwise_traffic(input_sizes: list[int], itemsize: int, rank: int) -> Traffic:
    """Return the traffic of `rank` in an all-to-all that sends `input_sizes[p]` elements to rank p."""
    sent = [size for peer, size in enumerate(input_sizes) if peer != rank and size]
    return Traffic(sum(sent) * itemsize, len(sent))


def _halving_doubling(numel: int, itemsize: int, ranks: int, rank: int) -> Traffic:
    power = 1 << (ranks.bit_length() - 1)
    if numel == 0:
        return Traffic()
    fold = Traffic(numel * itemsize, _num_segments(numel, itemsize))
    if rank >= power:
        return fold
    sent: list[int] = []
    have, bit = numel, power // 2
    while bit:
        kept = have // 2 if rank & bit else (have + 1) // 2
        sent += [have - kept, kept]  # the first while halving, the second while doubling
        have, bit = kept, bit // 2
    swaps = Traffic(sum(sent) * itemsize, sum(size > 0 for size in sent))
    return swaps + fold if rank + power < ranks else swaps


def _hierarchical(numel: int, itemsize: int, hosts: Hosts, rank: int) -> Traffic:
    by_host = ranks_by_host(hosts)
    host = next(number for number, ranks in enumerate(by_host) if rank in ranks)
    h, m, local = len(by_host), len(by_host[host]), by_host[host].index(rank)
    sent, per_block = Traffic(), max(1, len(hosts) * SEGMENT_BYTES // 2 // itemsize)
    for start in range(0, numel, per_block):
        block = min(per_block, numel - start)
        sent += traffic("all_reduce", "ring", block, itemsize, m, local)  # within the host
        shard = shard_sizes(block, m)[local]
        sent += traffic("all_reduce", "ring", shard, itemsize, h, host)  # between hosts
    return sent


def _num_segments(numel: int, itemsize: int) -> int:
    return -(-numel // max(1, SEGMENT_BYTES // itemsize))


def _num_children(position: int, ranks: int) -> int:
    """Return how many children a position, counted from the root, has in the binomial tree."""
    reach = position & -position if position else 1 << _log2_up(ranks)
    return sum(position + (1 << k) < ranks for k in range(reach.bit_length() - 1))


def _log2_up(n: int) -> int:
    return (n - 1).bit_length()
