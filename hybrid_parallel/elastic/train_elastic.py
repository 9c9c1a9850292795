"""Train with elastic recovery: when a rank is killed, the others continue without it.

    make run RUN_MODE=hybrid_elastic WORLD_SIZE=4 ARGS='--kill 2@20 0@40'
    RUN_MODE=hybrid_elastic ARGS='--steps 5000' docker-compose up --build   # then docker kill a node

What to read, in this order:
  1. elastic.py: `ElasticReplica` counts its steps, and copies the state of a rank that has taken more steps.
  2. survivors.py: `Survivors` agrees on which ranks are alive, and forms a new group of them.
  3. `main` below: when a step fails, the survivors form a group, catch up, and repeat the step.

README.md compares this with the two ways that restart dead ranks.
"""

import dataclasses

import torch

from comm.errors import CommError, Mismatch
from comm.script import start
from hybrid_parallel.elastic.deaths import Deaths, ElasticOptions
from hybrid_parallel.elastic.elastic import ElasticReplica
from hybrid_parallel.elastic.survivors import Survivors
from lab.check import refuse_unequal
from lab.cluster import Cluster
from lab.launch.same_start import check_same_start
from lab.models.model import GPT, GPTConfig, loss_of
from lab.trace.meter import Meter
from training.arguments import Size
from training.data import TrainingData
from training.replicas import replica_digests


@dataclasses.dataclass
class ElasticArgs(ElasticOptions):
    """Train a small GPT on replicas, and go on with the survivors when ranks die."""

    steps: int = 60
    """Number of optimizer steps."""
    batch_size: int = 24
    """Number of examples in a step, over all ranks together; the same before and after a death."""
    size: Size = "small"
    """Size of the GPT (lab/models/model.py)."""
    lr: float = 1e-3
    """Learning rate: the factor of the optimizer's update, a number without unit."""
    seed: int = 0
    """Number from which the initial weights and the batches are drawn."""
    json: bool = False
    """Print the report as one line of JSON at the end, on stdout; everything else goes to stderr."""


def main(cluster: Cluster, args: ElasticArgs) -> ElasticReplica:
    config = GPTConfig.named(args.size)
    data = TrainingData("gpt", args.batch_size, args.seed, config.block_size)
    check_same_start(cluster, data.everything, dataclasses.asdict(args) | {"json": ""})
    deaths = Deaths(args.kill, cluster.world_size)
    survivors = Survivors(cluster, args.patience)
    model = GPT(config, seed=args.seed + cluster.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    replica = ElasticReplica(model, optimizer, lambda model, x, y: loss_of(model(x), y) * len(x))
    meter = None  # None: the group is new, and its ranks must catch up first
    while True:
        try:
            if meter is None:
                replica.catch_up()
                meter = Meter(
                    survivors.cluster, "hybrid_elastic", args.steps, data.tokens_per_step, args.json,
                    first_step=replica.steps,
                )  # fmt: skip
            if replica.steps == args.steps:
                finish(survivors, replica, meter)
                return replica
            deaths.die_if_due(survivors.name, replica.steps)
            with meter.step() as record:
                x, y = data.batch(replica.steps)
                record.loss = replica.step(x, y, survivors.cluster.rank, survivors.cluster.world_size)
        except Mismatch:
            raise  # a bug in the code, not a death
        except CommError:  # a rank has died or hangs
            meter = None
            survivors.regroup()


def finish(survivors: Survivors, replica: ElasticReplica, meter: Meter) -> None:
    """Report the last group's steps, and check that its replicas are equal."""
    digests = replica_digests(survivors.cluster, replica.model)
    meter.finish(
        survivors=survivors.names, replicas_equal=len(set(digests)) == 1, replica_digest=digests[0][:16]
    )
    refuse_unequal(digests)


if __name__ == "__main__":
    start(main, ElasticArgs, in_a_child=True)  # or torchrun would end all ranks when it sees one die
