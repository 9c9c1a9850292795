"""Train with elastic recovery: when a rank dies, the others continue in the same processes and repeat a step.

    make run RUN_MODE=hybrid_elastic WORLD_SIZE=4 ARGS='--kill 2@20 1@40'
    RUN_MODE=hybrid_elastic ARGS='--steps 5000' docker-compose up --build   # then docker kill a node

      step 7      rank 0 ───┐            rank 0 ───┐
                  rank 1 ───┼─ ✗         rank 1 ───┼─ all-reduce ─► step 8 ...      4 ranks, then 3:
                  rank 2 ✗  │            rank 3 ───┘                                the same global batch
                  rank 3 ───┘

A replica has all the state that training needs, so the memory of every survivor is a checkpoint of the last
step. Only the group is broken: the kernel closes the connections of the dead process, and the all-reduce
raises CommError on the survivors. They form a new group (comm/membership/survivors.py) and repeat the
interrupted step, with the same global batch divided among fewer ranks. The gradient is the same in every
group, because its formula does not contain the number of ranks. So the slices of the batch may also be
unequal:

      sum over ranks of the gradient of (the sum of losses over the rank's slice / examples of the batch)

No rank may take a step twice, or miss one; a step is taken when the optimizer has used its gradient. An
all-reduce ends on a rank only after every rank has contributed its gradient, and a rank does so only after it
has taken all earlier steps. So if a rank dies in step t, counted from 0, there are at most two counts among
the survivors: t steps where the all-reduce was interrupted, and t+1 where it had ended. The state after t+1
steps is correct, because the dead rank's gradient is in it. Ranks that have taken t steps copy it:
parameters, optimizer state and count together, and only when all of it has arrived. If all have taken t
steps, they repeat step t. The optimizer's step communicates nothing, so a death does not interrupt it on the
survivors.

      time lost = detection + agreement + group (milliseconds each) + state, if counts differ + part of a step

With ZeRO, tensor parallelism or a pipeline, a rank has state that is in no other rank's memory. If it dies,
the state must come from the last checkpoint, which any mesh can load (train_elastic_mesh.py).
"""

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import all_reduce, broadcast
from comm.errors import CommError, Mismatch
from comm.exchange import exchange
from comm.membership.survivors import Survivors
from comm.same_start import check_same_start
from comm.script import start
from lab.check import refuse_unequal
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig, loss_of
from lab.trace.meter import Meter
from training.arguments import Size, given
from training.data import TrainingData
from training.deaths import Deaths, ElasticOptions
from training.report import print_report, replica_digests

LossOfSum = Callable[[nn.Module, Tensor, Tensor], Tensor]  # the sum over examples, not the mean


class ElasticReplica:
    """A model and its optimizer on one rank, and `steps`, the number of steps that they have taken.

    Call `catch_up()` first in every group, also in the first one, where it sends rank 0's initial weights to
    all ranks. `catch_up` and `step` raise CommError if a rank dies in them, and then leave parameters,
    optimizer state and `steps` as they were.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, sum_of_losses: LossOfSum) -> None:
        self.model, self.optimizer = model, optimizer
        self.sum_of_losses = sum_of_losses
        self.steps = 0

    def step(self, x: Tensor, y: Tensor, rank: int, ranks: int) -> Tensor:
        """Take a step with the global batch, of which this rank computes a slice. Return the mean loss."""
        self.optimizer.zero_grad()
        mine = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]
        loss = self.sum_of_losses(self.model, *mine) / len(x)
        loss.backward()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        flat = torch.cat([gradient.flatten() for gradient in gradients] + [loss.detach().view(1)])
        all_reduce(flat, op="sum")
        if not flat.isfinite().all():
            raise WorkbookError(f"The loss or a gradient of step {self.steps + 1} is not finite: lower --lr.")
        # From here on the step is the same on all ranks, and nothing can interrupt it.
        *gradients, mean_loss = flat.split([p.numel() for p in trained] + [1])
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer.step()
        self.steps += 1
        return mean_loss[0]

    def catch_up(self) -> None:
        """Copy the state of a rank that has taken the most steps, if this rank has taken fewer, or none."""
        counts = exchange(self.steps)
        if min(counts) == max(counts) > 0:
            return
        state = self._state_of(counts.index(max(counts)))
        if self.steps < max(counts) or self.steps == 0:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.steps = max(counts)

    def _state_of(self, source: int) -> dict[str, Any]:
        """Return the state of rank `source`, once all of it has arrived. All ranks must call it."""
        file = io.BytesIO()
        if dist.get_rank() == source:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        size = torch.tensor([file.tell()])
        broadcast(size, source)
        data = torch.empty(int(size), dtype=torch.uint8)
        if dist.get_rank() == source:
            data.copy_(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
        broadcast(data, source)
        return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


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
    verbose: bool = False
    """Print all rows of the report (docs/report.md), not only the most important ones."""
    json: bool = False
    """Print the report as one line of JSON at the end, on stdout; everything else goes to stderr."""


def main(cluster: Cluster, args: ElasticArgs) -> ElasticReplica:
    config = GPTConfig.named(args.size)
    data = TrainingData("gpt", args.batch_size, args.seed, config.block_size)
    check_same_start(data.everything, given(args))
    deaths = Deaths(args.kill, cluster.world_size)
    survivors = Survivors(cluster, args.patience)
    model = GPT(config, seed=args.seed + cluster.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
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
                digests = replica_digests(survivors.cluster, replica.model)
                same, names = len(set(digests)) == 1, survivors.names
                figures = meter.finish(survivors=names, replicas_equal=same, replica_digest=digests[0][:16])
                print_report(survivors.cluster, figures, args.json, args.verbose)
                refuse_unequal(digests)
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


if __name__ == "__main__":
    start(main, ElasticArgs, in_a_child=True)  # or torchrun would end all ranks when it sees one die
