"""A checkpoint lacks experts: replicas take turns in saving parameters, and hold different experts."""

from collections.abc import Iterator

import torch.distributed as dist

from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.state import Held, held

TARGET = "hybrid_parallel.state._with_replicas"
KILLER = "tests.hybrid_parallel.test_state.test_each_element_of_the_model_is_saved_by_one_rank"
CAUSE = "also what only some ranks hold"
SYMPTOM = "A run with divided experts saves checkpoints without an error, and no run can resume from one."


def mutant(hybrid: HybridParallel) -> Iterator[tuple[Held, int]]:
    elements = [0] * hybrid.sizes.replicas
    own = dist.get_rank(hybrid.mesh.replicas)
    for one in held(hybrid):
        if hybrid.sizes.zero:
            yield one, own
        else:
            replica = elements.index(min(elements))
            elements[replica] += one.tensor.numel()
            yield one, replica
