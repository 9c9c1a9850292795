"""Predict the seconds in which replicas keep their parameters equal: gradients, ZeRO, and the optimizer.

    data axis     gradients and what ZeRO gathers, a layer at a time; without a pipeline one microbatch hides
                  them, except for one layer's and for the parameters that ZeRO 1 and 2 gather after the step
    experts       gradients of experts that are divided among e replicas: the n/e of n replicas that hold the
                  same ones reduce them, and all n reduce the other gradients
    optimizer     bytes / bandwidth

The replicas are the ranks along the data and the context axis together.
"""

from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory_model import (
    experts_of,
    fullest_ranks,
    layers_of,
    parameters_of,
    state_bytes,
)
from hybrid_parallel.planner.seconds import collective
from hybrid_parallel.planner.shapes import AnyShape
from hybrid_parallel.sizes import ParallelSizes

ADAM_BYTES = 28  # read and written for each number: parameter, gradient, both moments


def replica_seconds(
    shape: AnyShape, machine: Machine, sizes: ParallelSizes, forward: float, backward: float
) -> float:
    """Return the seconds of the data axis's collectives that no computation hides.

    `forward` and `backward` are the seconds of a rank's layers in a microbatch.
    """
    if sizes.replicas == 1:
        return 0.0
    rank, m = _fullest(shape, sizes), sizes.microbatches
    own, layers = experts_of(shape, sizes, rank), max(1.0, layers_of(shape, sizes, 0))
    e = sizes.expert_ranks if own else 1
    # The numbers that are reduced together, the ranks that do so, and how far these are apart.
    parts = [(parameters_of(shape, sizes, rank), sizes.replicas, sizes.tensor)]
    if e > 1:
        parts = [(parts[0][0] - own, *parts[0][1:]), (own, sizes.replicas // e, e * sizes.tensor)]
    of_parameter, of_gradient, _ = state_bytes(sizes, machine.autocast)

    def seconds(op: str, size: float) -> tuple[float, float]:
        """Return the seconds of the collectives of all layers, and those of a core for their copies."""
        comm = copies = 0.0
        for numbers, ranks, stride in parts:
            link = machine.link(ranks, stride)
            each = layers * collective(op, numbers / layers * size, ranks, link)
            comm += each
            copies += each / link.beta * machine.handling.byte / machine.share if link.beta else 0.0
        return comm, copies

    def left(ops: list[tuple[float, float]], hiding: float) -> float:
        """Return the seconds of collectives that `hiding` seconds of computing do not hide."""
        comm, copies = map(sum, zip(*ops, strict=True))
        return comm if sizes.pipeline > 1 else max(comm - hiding, comm / layers) + copies

    if sizes.zero == 0:
        return left([seconds("all_reduce", of_gradient)], backward)
    scatter, gather = seconds("reduce_scatter", of_gradient), seconds("all_gather", of_parameter)
    if sizes.zero == 1:
        return left([scatter], backward) + gather[0]
    if sizes.zero == 2:
        return m * left([scatter], backward) + gather[0]
    return m * (left([gather], forward) + left([gather, scatter], backward))


def optimizer_seconds(shape: AnyShape, machine: Machine, sizes: ParallelSizes) -> float:
    """Return the seconds in which a rank changes the parameters whose optimizer state it has."""
    numbers = parameters_of(shape, sizes, _fullest(shape, sizes))
    owners = sizes.replicas if sizes.zero else 1
    return numbers / owners * ADAM_BYTES / machine.device.bytes_per_second / machine.share


def _fullest(shape: AnyShape, sizes: ParallelSizes) -> int:
    """Return the place in the pipeline of a rank with the most parameters."""
    return max(fullest_ranks(sizes), key=lambda rank: parameters_of(shape, sizes, rank))
