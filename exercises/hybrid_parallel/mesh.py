"""Laying out the mesh. Write `coordinates_of` and `groups_of` of hybrid_parallel/mesh.py.

Read notebooks/09_everything_on_one_mesh.ipynb first. Do not open hybrid_parallel/mesh.py yet: it contains
the solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    ParallelSizes(pipeline: int = 1, data: int = 1, tensor: int = 1, zero: Zero = 0, sequence_parallel:
            bool = False, schedule: Schedule = '1f1b', chunks: int = 2, microbatches: int = 1, recompute:
            bool = False, precision: Precision = 'float32', pattern: str | None = None)
        Holds the number of ranks along each axis, and what the ranks of an axis do.
    sizes.data: int
    sizes.tensor: int
    sizes.world_size: int
        Return the number of ranks: the product of the axes.

Check it with `python -m exercises check mesh`.
"""

from hybrid_parallel.sizes import ParallelSizes


def coordinates_of(rank: int, sizes: ParallelSizes) -> dict[str, int]:
    """Return a rank's place along each axis, from 0, as a dictionary of "pipeline", "data" and "tensor".

    The ranks of a tensor group are neighbours, because they send the most, and a launcher numbers the
    ranks of one machine one after the other. After them come the other replicas of the same stage,
    and then the next stage. `sizes.pipeline`, `sizes.data` and `sizes.tensor` are the numbers of
    places. With 2 x 2 x 2 ranks, rank 5 has the places {"pipeline": 1, "data": 0, "tensor": 1}.
    """
    raise NotImplementedError("Laying out the mesh is not written yet: `coordinates_of` has no body.")


def groups_of(axis: str, sizes: ParallelSizes) -> list[list[int]]:
    """Return the groups along an axis: lists of ranks that differ in their place along this axis only.

    Each list is in the order of the places, and the lists are in the order of their first ranks.
    """
    raise NotImplementedError("Laying out the mesh is not written yet: `groups_of` has no body.")
