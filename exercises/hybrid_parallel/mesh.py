"""Laying out the mesh. Write `coordinates_of` and `groups_of` of hybrid_parallel/mesh.py.

Read notebooks/09_everything_on_one_mesh.ipynb first. Do not open hybrid_parallel/mesh.py yet: it has the
solution.

You may use:

    sizes.world_size: int
        The number of ranks: the product of the axes.

Check it with `python -m exercises check mesh`.
"""

from hybrid_parallel.sizes import ParallelSizes


def coordinates_of(rank: int, sizes: ParallelSizes) -> dict[str, int]:
    """Return a rank's place along each axis, from 0, as a dictionary.

    Its keys are "pipeline", "data", "context" and "tensor". The ranks of a tensor group are
    neighbours, because they send the most, and a launcher numbers the ranks of one machine one after
    the other. After them come the ranks with other tokens of the same examples (context), then those
    with other examples (data), and then the next stage. `sizes.pipeline`, `sizes.data`,
    `sizes.context` and `sizes.tensor` are the numbers of places. With 2 x 2 x 1 x 2 ranks, rank 5 has
    the places {"pipeline": 1, "data": 0, "context": 0, "tensor": 1}.
    """
    raise NotImplementedError("`coordinates_of` is not written yet.")


def groups_of(axis: str, sizes: ParallelSizes) -> list[list[int]]:
    """Return the groups along an axis: lists of ranks that differ in their place along this axis only.

    Each list is in the order of the places, and the lists are in the order of their first ranks.
    """
    raise NotImplementedError("`groups_of` is not written yet.")
