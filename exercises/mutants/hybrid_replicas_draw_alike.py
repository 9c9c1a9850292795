"""More replicas help less than they should: all draw the same dropout masks."""

from hybrid_parallel.sizes import ParallelSizes

TARGET = "hybrid_parallel.run.stream_of"
KILLER = "tests.hybrid_parallel.test_run.test_replicas_and_stages_draw_masks_of_their_own"
CAUSE = "must draw the same mask"


def mutant(rank: int, sizes: ParallelSizes) -> int:
    return rank // (sizes.tensor * sizes.replicas)
