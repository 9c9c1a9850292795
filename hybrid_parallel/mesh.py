"""Form the groups of a job: along the pipeline, data, context and tensor axes, one for each line of ranks.

      8 ranks = 2 (pipeline) x 2 (data) x 2 (tensor)

               stage 0                  stage 1
               tensor 0   tensor 1      tensor 0   tensor 1
      data 0   rank 0     rank 1        rank 4     rank 5
      data 1   rank 2     rank 3        rank 6     rank 7

The ranks of a group differ in their coordinate along one axis, and in no other: 0 and 1 divide each layer of
stage 0 (tensor), 0 and 2 average their gradients (data), 0 and 4 exchange activations and their gradients
(pipeline). The context axis, here of size 1, lies between data and tensor: its ranks have different tokens of
the same examples.

Ranks that differ only in their places along data and context are replicas: they train the same parameters
with different tokens, so they average their gradients together. Replicas that are neighbours, `expert_ranks`
in number, divide the experts of each layer among them: with 2 here, ranks 0 and 2 are an expert group.

Launchers give consecutive numbers to the ranks of one machine. So the groups of the last axis, whose ranks
are neighbours, stay inside a machine, and those of the first axis cross machines. A rank sends the most along
the last axis, and the least along the first:

      tensor      activations and their gradients, several times in each layer, and the rank waits for them
      context     keys and values, in each layer
      data        gradients, once in a step, or with ZeRO 2 and 3 once for each microbatch; with ZeRO also
                  parameters
      pipeline    one activation or gradient for each microbatch over each boundary between stages

After Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
2021, https://arxiv.org/abs/2104.04473, section 3.
"""

import torch.distributed as dist

from comm.collectives import use_pattern
from comm.exchange import naming_a_lost_rank
from comm.wire.groups import own_group
from expert_parallel.config import ExpertGroups
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster

AXES = ("pipeline", "data", "context", "tensor")


def coordinates_of(rank: int, sizes: ParallelSizes) -> dict[str, int]:
    """Return a rank's place along each axis, from 0. Neighbours differ in the last axis, `tensor`."""
    place: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(sizes, axis))
    return place


def stream_of(rank: int, sizes: ParallelSizes) -> int:
    """Return the number of a rank's stream of random numbers, from which it draws its dropout masks.

    The ranks of a tensor group hold the same activations, and need the same masks.
    """
    return rank // sizes.tensor


def groups_of(axis: str, sizes: ParallelSizes) -> list[list[int]]:
    """Return the groups along an axis: lists of ranks that differ in their place along this axis only.

    Each list is in the order of the places, and the lists are in the order of their first ranks.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(sizes.world_size):
        others = tuple(place for name, place in coordinates_of(rank, sizes).items() if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def replicas_of(sizes: ParallelSizes) -> list[list[int]]:
    """Return the groups of ranks that differ in their places along the data and context axes only."""
    stage = sizes.replicas * sizes.tensor  # the ranks of a stage have consecutive numbers
    firsts = [at + place for at in range(0, sizes.world_size, stage) for place in range(sizes.tensor)]
    return [list(range(first, first + stage, sizes.tensor)) for first in firsts]


class Mesh:
    """Holds the groups that this rank belongs to, and its coordinate along each axis.

    All ranks of the job must create the mesh together. Along an axis of size 1 each rank is a group, which
    all axes of size 1 share: to form a group takes milliseconds and a thread.
    """

    def __init__(self, cluster: Cluster, sizes: ParallelSizes) -> None:
        self.sizes, self.rank = sizes, cluster.rank
        alone = [axis for axis in AXES if getattr(sizes, axis) == 1]
        with naming_a_lost_rank("form the groups of the mesh"):
            formed = {axis: own_group(groups_of(axis, sizes), axis) for axis in AXES if axis not in alone[1:]}
            # What replicas send counts for the data axis: without a context axis they are its ranks.
            replicas = None if sizes.context == 1 else own_group(replicas_of(sizes), "data")
        self._groups = {axis: formed[alone[0] if axis in alone else axis] for axis in AXES}
        self.pipeline, self.data, self.context, self.tensor = self._groups.values()
        self.replicas = replicas or self.data
        self.experts: ExpertGroups | None = None
        for group in {*self._groups.values(), self.replicas}:
            use_pattern(sizes.pattern, group)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one in their place along `axis` only."""
        return self._groups[axis]

    def coordinate(self, axis: str) -> int:
        """Return this rank's place along `axis`, from 0."""
        return coordinates_of(self.rank, self.sizes)[axis]

    def form_expert_groups(self) -> ExpertGroups:
        """Form the groups that share experts, and those that hold the same ones. All ranks must call it."""
        each, every = self.sizes.expert_ranks, replicas_of(self.sizes)
        sharing = [ranks[first : first + each] for ranks in every for first in range(0, len(ranks), each)]
        same = [ranks[place::each] for ranks in every for place in range(each)]
        with naming_a_lost_rank("form the groups of the experts"):
            self.experts = ExpertGroups(self.replicas, own_group(sharing, "expert"), own_group(same, "data"))
        for group in (self.experts.experts, self.experts.replicas):
            use_pattern(self.sizes.pattern, group)
        return self.experts


def drawn_mesh(sizes: ParallelSizes) -> str:
    """Return a picture of all ranks as above: a row for each replica of a stage, a block for each stage."""
    width = max(len(f"rank {sizes.world_size - 1}"), len(f"tensor {sizes.tensor - 1}")) + 3
    names = [
        f"data {place // sizes.context}" + f", context {place % sizes.context}" * (sizes.context > 1)
        for place in range(sizes.replicas)
    ]
    first = max(map(len, names)) + 3
    columns = [[name.ljust(first) for name in ("", "", *names)]]
    for stage in range(sizes.pipeline):
        column = [[f"stage {stage}"], [f"tensor {t}" for t in range(sizes.tensor)]]
        for place in range(sizes.replicas):
            rank = (stage * sizes.replicas + place) * sizes.tensor
            column.append([f"rank {rank + t}" for t in range(sizes.tensor)])
        block = width * sizes.tensor + 3
        columns.append(["".join(cell.ljust(width) for cell in row).ljust(block) for row in column])
    return "\n".join([str(sizes), "", *("".join(row).rstrip() for row in zip(*columns, strict=True))])
