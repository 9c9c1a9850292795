"""Predict the seconds in which the tokens of a layer travel to their experts and back.

    counts      an all-gather among all n replicas says how many tokens each of them sends to each expert; it
                takes log2 n rounds
    forward     dispatch and combine: two all-to-alls of k copies of a rank's tokens, for their k experts,
                among e expert ranks; (e-1)/e of the bytes leave the rank
    backward    their gradients, the same ways back

Nothing of this is hidden. The bytes are those of expert_parallel/expected_traffic.py if all experts are
chosen equally often. With some chosen more often than others a step takes longer than predicted. The ranks of
the tensor axis all send the same tokens. With sequence parallelism, which other programs offer beside
experts, each of them sends its own.
"""

from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory_model import ITEMSIZE
from hybrid_parallel.planner.seconds import Pass, collective
from hybrid_parallel.planner.shapes import AnyShape
from hybrid_parallel.sizes import ParallelSizes

COUNT_BYTES = 8


def expert_passes(
    shape: AnyShape, machine: Machine, sizes: ParallelSizes, tokens: float
) -> tuple[Pass, Pass]:
    """Return what sending tokens to experts adds to the forward and to the backward of a layer.

    A rank has `tokens` in a microbatch.
    """
    if shape.experts == 1 or sizes.replicas == 1:
        return Pass(), Pass()
    sending = _exchanges(shape, machine, sizes, tokens)
    counts_bytes = COUNT_BYTES * shape.experts * sizes.replicas
    link = machine.pairwise_link(sizes.replicas, sizes.tensor)
    seconds = collective("all_gather", counts_bytes, sizes.replicas, link, "bruck")
    handling = machine.handling.seconds(1, counts_bytes * (1 - 1 / sizes.replicas))
    return sending + _handled(seconds, handling), sending


def _exchanges(shape: AnyShape, machine: Machine, sizes: ParallelSizes, tokens: float) -> Pass:
    """Return two all-to-alls of the tokens. Their parts have different sizes, which are exchanged first."""
    e = sizes.expert_ranks
    if e == 1:
        return Pass()
    own = tokens / (sizes.tensor if sizes.sequence_parallel else 1)
    size = own * shape.active_experts * shape.width * ITEMSIZE[sizes.precision]
    link = machine.pairwise_link(e, sizes.tensor)
    once = collective("all_to_all", size, e, link, "pairwise") + (e - 1).bit_length() * link.alpha
    return _handled(2 * once, machine.handling.seconds(2, 2 * (e - 1) / e * size))


def _handled(seconds: float, handling: float) -> Pass:
    return Pass(handling, experts=max(0.0, seconds - handling))
