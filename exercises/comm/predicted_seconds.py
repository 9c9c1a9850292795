"""The predicted time of a collective. Write `seconds` of comm/cost.py.

Read notebooks/03_cost_of_a_message.ipynb first. Do not open comm/cost.py yet: it has the solution.

You may use:

    _log2_up(n: int) -> int
        Return log2 n, rounded up.

Check it with `python -m exercises check predicted_seconds`.
"""

from comm.cost import _log2_up
from comm.wire.slow_link import Link


def seconds(op: str, pattern: str, num_bytes: int, ranks: int, link: Link) -> float:
    """Return the predicted seconds of a collective. The full tensor has `num_bytes`, on all n ranks.

    A message of b bytes takes link.alpha + b * link.beta seconds. With one rank nothing is sent: the
    result is 0, for any op and pattern. L = `_log2_up(n)` is the number of rounds of a tree, and B
    the bytes of the full tensor.

        barrier           tree       no message but headers
        broadcast         flat       the root sends n-1 times, one message after another; the
                                     latencies overlap: alpha + (n-1) B beta
                          tree       L rounds with the full tensor
        reduce            flat, tree as a broadcast
                          pairwise   a reduce_scatter, pairwise, and a flat gather of the result
        scatter, gather   flat       n-1 messages of an n-th each; the latencies overlap
        all_gather        ring       n-1 messages of an n-th, one after another
        reduce_scatter    ring       the same
        all_reduce        ring       a reduce_scatter and an all_gather
                          flat, tree a reduce and a broadcast
                          recursive_doubling   log2 n rounds; each sends the full tensor
                          halving_doubling     log2 n rounds, which send 1/2, 1/4, ... and 1/n of
                                     the tensor, and the same number of rounds back
        all_to_all        pairwise   n-1 messages of an n-th, one after another

    Wherever there is a ring, pipelined_ring and pairwise are patterns, too, and cost as much. If n is
    no power of two, the two doublings take as long as with the largest power of two below n, and two
    messages of the full tensor more.

    Before a collective the ranks compare small messages, the headers. Their bytes are ignored. Add
    them once to each collective, also where it is two in sequence: L alpha. Raise ValueError "There
    is no formula for {op} with pattern {pattern!r}." for anything else.
    """
    raise NotImplementedError("`seconds` is not written yet.")
