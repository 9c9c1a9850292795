"""Train elastically on a mesh: when a rank dies, the others divide the model among them again.

    make run RUN_MODE=hybrid_elastic_mesh WORLD_SIZE=4 ARGS='--zero 3 --checkpoint runs/first --kill 2@20'

      4 ranks = 2 (pipeline) x 2 (data)        3 ranks = 3 (pipeline) x 1 (data)

      rank 0   layers 0-3    rank 2 ✗          rank 0   layers 0-2
      rank 1   layers 0-3    rank 3  4-7       rank 1   layers 3-5    ◄── step-16/  the last checkpoint
                                               rank 3   layers 6-7

In train_elastic.py each survivor has all that training needs. With ZeRO, stages or divided layers a part of
the model, or of the optimizer's state, dies with its rank. But a checkpoint can be loaded on any mesh
(training/checkpoint.py). So the survivors choose a mesh of their number, load what each one holds there, and
repeat the steps since the checkpoint.

      time lost = detection + agreement + groups + loading + steps since the checkpoint

What to read, in this order:
  1. comm/membership/survivors.py: `Survivors` agrees on which ranks are alive, and forms their group.
  2. `sizes_for` below chooses the mesh.
  3. `main` begins the loop of train_hybrid.py again in each group, from the last checkpoint.
"""

import dataclasses
import itertools
import math
from functools import partial
from typing import ClassVar

from torch.distributed import DistError

from comm.errors import CommError, LostRank, Mismatch
from comm.membership.survivors import Survivors
from comm.script import start
from hybrid_parallel.arguments import HybridArgs, model_of, sizes_of
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from hybrid_parallel.train_hybrid import begin, train
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from training.deaths import Deaths, ElasticOptions


@dataclasses.dataclass
class ElasticMeshArgs(ElasticOptions, HybridArgs):
    """Train a small model on a mesh, and go on with the survivors, on another mesh, when ranks die."""

    in_sight: ClassVar[set[str]] = HybridArgs.in_sight - {"config"} | {"kill"}


def main(cluster: Cluster, args: ElasticMeshArgs) -> None:
    if args.config is not None:
        raise WorkbookError("--config: this script takes the sizes as options, such as --pipeline 2.")
    sizes, deaths = sizes_of(args, cluster.world_size), Deaths(args.kill, cluster.world_size)
    here = model_of(args), args.batch_size, cluster.world_size, args.experts
    refuse_sizes(sizes, *here)  # before ranks may die: one error, from rank 0
    survivors = Survivors(cluster, args.patience)
    while True:
        try:
            run, hybrid = begin(survivors.cluster, args, "hybrid_elastic_mesh")
            die_if_due = partial(deaths.die_if_due, survivors.name)
            train(run, hybrid, args, die_if_due, survivors=survivors.names)
            return
        except Mismatch:
            raise  # a bug in the code, not a death
        except (CommError, LostRank, DistError):  # torch raises the last one if the store's rank dies
            survivors.regroup()
        # The first mesh is the same on all ranks; a mesh in between may have formed on some of them only.
        mesh = dataclasses.asdict(sizes_for(survivors.cluster.world_size, args, sizes))
        args = dataclasses.replace(args, **mesh, auto_resume=args.checkpoint is not None)


def sizes_for(ranks: int, args: HybridArgs, before: ParallelSizes) -> ParallelSizes:
    """Return the sizes with which all `ranks` ranks go on. Raise WorkbookError if they cannot.

    Of the meshes that refuse_sizes accepts, this takes one whose ranks hold no more of the model than before,
    if there is one, and then the one that is most like the mesh before.
    """
    model = model_of(args)
    fitting, refusal = [], None
    contexts = range(1, before.context + 1)
    for tensor, pipeline, context in itertools.product(range(1, ranks + 1), range(1, ranks + 1), contexts):
        data, rest = divmod(ranks, tensor * pipeline * context)
        sizes = dataclasses.replace(
            before, pipeline=pipeline, data=data, context=context, tensor=tensor,
            sequence_parallel=before.sequence_parallel and tensor > 1,
            expert_ranks=math.gcd(args.experts, data * context) if before.expert_ranks > 1 else 1,
            compress=before.compress if data > 1 else None, sync_every=before.sync_every if data > 1 else 1,
        )  # fmt: skip
        if rest or not data:
            continue
        try:
            refuse_sizes(sizes, model, args.batch_size, ranks, args.experts)
            fitting.append(sizes)
        except WorkbookError as error:
            refusal = refusal or error
    if not fitting:
        raise WorkbookError(f"{ranks} ranks are left, and cannot train this model: {refusal}")

    def likeness(sizes: ParallelSizes) -> tuple[int, ...]:
        is_small_enough = sizes.holders >= before.holders and sizes.expert_ranks >= before.expert_ranks
        kept = (getattr(sizes, axis) == getattr(before, axis) for axis in ("tensor", "pipeline", "context"))
        return is_small_enough, *kept, -abs(sizes.holders - before.holders)

    return max(fitting, key=likeness)


if __name__ == "__main__":
    start(main, ElasticMeshArgs, in_a_child=True)  # torchrun would end all ranks when it sees one die
