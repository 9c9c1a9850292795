"""Predict the seconds that the context axis adds to a layer.

With n ranks, of which each has an n-th of the tokens:

    ring          forward    n-1 messages of keys and values, each behind the attention to one block of keys
                  backward   the same messages, and n-1 of gradients; the last one is not hidden
                             (context_parallel/predict.py)
    all-to-all    forward    queries, keys and values to the ranks of their heads, and the outputs back
                  backward   their gradients, the same ways back; nothing is hidden
    gather        forward    all keys and values, before the attention begins
                  backward   a scatter of their gradients; nothing is hidden

The bytes are those of context_parallel/expected_traffic.py. With the zigzag cut each rank computes equally
much in each step of the ring, an n-th of its attention. A message of a ring between two nodes goes through
one network card, and an all-to-all through those of all ranks.

A rank also computes more. In a ring it adds each block's result to a sum in float32: it reads both and writes
the sum, for the queries in the forward, and for the gradients of queries, keys and values in the backward.
For an all-to-all it copies what it sends and what it receives. The time to call these kernels is left out,
so a ring whose blocks have few tokens takes longer than predicted.
"""

from context_parallel.predict import ring_passes
from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory_model import ITEMSIZE
from hybrid_parallel.planner.seconds import Pass, collective
from hybrid_parallel.planner.shapes import AnyShape
from hybrid_parallel.sizes import ParallelSizes

ADDING_BYTES = 12  # for each number of a float32 sum: read it and the summand, and write it
COPYING_BYTES = 2  # times that of a number: read it, and write it

Passes = tuple[Pass, Pass]


def context_passes(
    shape: AnyShape, machine: Machine, sizes: ParallelSizes, tokens: float, attention: float
) -> Passes:
    """Return what the context axis adds to the forward and to the backward of a layer.

    A rank has `tokens` in a microbatch. Its core needs `attention` seconds for their attention to all keys.
    """
    if sizes.context == 1:
        return Pass(), Pass()
    if machine.gathers_keys:
        return _gather(shape, machine, sizes, tokens)
    way = {"ring": _ring, "all_to_all": _all_to_all}[sizes.attention]
    return way(shape, machine, sizes, tokens, attention)


def _ring(shape: AnyShape, machine: Machine, sizes: ParallelSizes, tokens: float, attention: float) -> Passes:
    n, queries, keys_and_values = sizes.context, *_numbers(shape, sizes, tokens)
    size = keys_and_values * ITEMSIZE[sizes.precision]
    link, handling = machine.message_link(n, sizes.tensor), machine.handling.seconds(1, size)
    blocks = [attention / n / machine.share] * n  # the seconds of each step of the ring
    forward, backward = ring_passes(blocks, max(0.0, link.alpha + size * link.beta - handling))
    adding = n * ADDING_BYTES / machine.device.bytes_per_second
    work = (n - 1) * handling + adding * queries
    work_again = 2 * (n - 1) * handling + adding * (queries + keys_and_values)
    return (
        Pass(work, context=max(0.0, forward - sum(blocks))),
        Pass(work_again, context=max(0.0, backward - 2 * sum(blocks))),
    )


def _all_to_all(shape: AnyShape, machine: Machine, sizes: ParallelSizes, tokens: float, _: float) -> Passes:
    n, queries, keys_and_values = sizes.context, *_numbers(shape, sizes, tokens)
    c, link = ITEMSIZE[sizes.precision], machine.pairwise_link(n, sizes.tensor)
    there, back = (queries + keys_and_values) * c, queries * c
    waiting = sum(collective("all_to_all", size, n, link, "pairwise") for size in (there, back))
    handling = machine.handling.seconds(2, (n - 1) / n * (there + back))
    copying = 2 * COPYING_BYTES * (there + back) / machine.device.bytes_per_second
    each = Pass(handling + copying, context=max(0.0, waiting - handling))
    return each, each


def _gather(shape: AnyShape, machine: Machine, sizes: ParallelSizes, tokens: float) -> Passes:
    n, (_, keys_and_values) = sizes.context, _numbers(shape, sizes, tokens)
    size = n * keys_and_values * ITEMSIZE[sizes.precision]
    seconds = collective("all_gather", size, n, machine.link(n, sizes.tensor))
    return Pass(context=seconds), Pass(context=seconds)


def _numbers(shape: AnyShape, sizes: ParallelSizes, tokens: float) -> tuple[float, float]:
    """Return how many numbers a rank's queries have, and how many its keys and values have together."""
    return tokens * shape.query_width / sizes.tensor, tokens * 2 * shape.kv_width / sizes.tensor
