"""The predicted time of a collective. Write `seconds` of comm/cost.py.

Check it with `python -m exercises check predicted_seconds`.
"""

from comm.cost import Link, _log2_up


def seconds(op: str, pattern: str, num_bytes: int, ranks: int, link: Link) -> float:
    """Return the predicted seconds of a collective, headers included. The full tensor has `num_bytes`.

    A message of b bytes takes link.alpha + b * link.beta seconds. With one rank nothing is sent. The
    patterns, with n ranks, and L rounds of a tree (`_log2_up`):

        barrier           tree (headers only)
        broadcast         flat, tree          flat: n-1 sends, whose latencies overlap
        reduce            flat, tree
        scatter, gather   flat                n-1 messages of an n-th; latencies overlap
        all_gather        ring
        reduce_scatter    ring
        all_reduce        ring, flat (a reduce and a broadcast), tree (the same)
                          recursive_doubling, halving_doubling
        all_to_all        pairwise            n-1 messages of an n-th, one after another

    The patterns pipelined_ring, tcp and cma cost as much as ring. If n is no power of two, the two
    doublings take as long as with the largest power of two below n, and two messages of the full
    tensor more. Headers take L alpha; with tcp and cma (n-1) alpha; 2 L alpha in an all_to_all. Raise
    ValueError "There is no formula for {op} with pattern {pattern!r}." for anything else.
    """
    raise NotImplementedError("The predicted time of a collective is not written yet: `seconds` has no body.")
