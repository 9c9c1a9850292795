"""DiLoCo whose workers die and come back: a synchronisation takes the mean over those who are there.

    make run RUN_MODE=diloco_elastic WORLD_SIZE=4 ARGS='--steps 2000 --kill 2@200 --come-back 1'
    RUN_MODE=diloco_elastic ARGS='--steps 5000' docker-compose up --build   # docker kill and start a node

      rank 0   ── train ──┐             ┌── train ──┐             ┌─ ... ──┐             ┌── train ── ...
      rank 1   ── train ──┼─ mean of 3 ─┼── train ──┼─ mean of 2 ─┼─ ... ──┼─ mean of 2 ─┼── train ── ...
      rank 2   ── train ──┘             └── tra ✗                   starts ─┘ copies      └── train ── ...

Between two synchronisations a worker needs no other one, so a death costs that worker's part of a round and
nothing else. The others notice it when they synchronise: the all-reduce raises CommError, they form a new
group (comm/membership/survivors.py), and repeat the synchronisation alone. A worker's examples depend on its
name and the step only, so no one takes over those of a dead one.

A synchronisation is taken on all workers or repeated. An all-reduce ends on a rank only after every rank has
contributed its change, so if one dies in synchronisation r, there are at most two counts among the survivors:
r where the all-reduce was interrupted, and r+1 where it had ended. The state after r+1 is correct, because
the dead worker's change is in it, and the outer step communicates nothing. Ranks that have r copy that state,
which is small: the anchor and the outer momentum. A rank that has r+1 may train already; after each step it
looks whether the others form a group, and joins in.

A worker that comes back connects to rank 0, whose address is in the store of the rendezvous. At the next
synchronisation the others form a group with it. It copies anchor, outer momentum and counts, contributes
nothing to this mean, and trains from the new anchor. Its AdamW starts afresh: the inner state is never sent,
and the old one died with the process. AdamW corrects the bias of its averages, so the new ones are right, and
only noisier at first.

      time lost    death    that worker's steps since the last synchronisation, and milliseconds for the group
                   join     milliseconds for the group, and 2 P on the wire      P: bytes of all parameters

Rank 0 coordinates the others, so if it dies, they end with a sentence.
"""

import dataclasses

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
from lab.models.text import rank_slice
from lab.trace.meter import Meter
from lab.units import MAX_SECONDS
from low_communication.train_diloco import AnchoredParameters, refuse_options
from training.arguments import Size, given
from training.data import TrainingData
from training.deaths import Deaths, ElasticOptions
from training.report import print_report, replica_digests
from training.validate import refuse_if, validate_numbers


class Worker:
    """A model and its optimizer on one rank, with anchor and outer momentum, and what it has done so far.

    `steps` counts all steps up to here, also those before this worker came, and `rounds` synchronisations.
    Call `catch_up()` first in every group, also in the first one, where it sends rank 0's initial weights to
    all ranks. `catch_up` and `synchronise` raise CommError if a rank dies in them, and then leave everything
    as it was. All parameters of the model are sent, also frozen ones; buffers are not.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int, sync_every: int,
        outer_lr: float = 0.7, outer_momentum: float = 0.9,
    ) -> None:  # fmt: skip
        self.model, self.optimizer = model, optimizer
        self.total_steps, self.sync_every = total_steps, sync_every
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.all = AnchoredParameters(list(model.parameters()))
        self.steps, self.rounds = 0, -1  # no anchor yet
        self.loss: Tensor | None = None  # of the last step; None if it has not trained in this round

    def round_is_over(self) -> bool:
        return self.steps == min((self.rounds + 1) * self.sync_every, self.total_steps)

    def is_done(self) -> bool:
        return self.rounds * self.sync_every >= self.total_steps

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step alone, with this worker's part of the batch. Return its loss."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.steps, self.loss = self.steps + 1, loss.detach()
        return self.loss

    @torch.no_grad()
    def synchronise(self) -> Tensor | None:
        """Take the outer step with the mean change of those who have trained. Return their mean loss."""
        change, has_trained = self.all.anchor - self.all.flat(), self.loss is not None
        flat = torch.cat([change, change.new_tensor([self.loss if has_trained else 0.0, has_trained])])
        all_reduce(flat, op="sum")
        if not flat.isfinite().all():
            raise WorkbookError(f"A loss or a parameter is not finite after step {self.steps}: lower --lr.")
        # From here on the synchronisation is the same on all ranks, and nothing can interrupt it.
        workers = flat[-1]
        if not workers:  # all who had trained have died: those who have just come train this round
            self.steps = self.rounds * self.sync_every
            return None
        change, loss = flat[:-2] / workers, flat[-2] / workers
        if self.steps % self.sync_every:  # a part of a round: no outer step (see StreamingDiLoCo.finish)
            self.all.anchor -= change
        else:
            self.all.outer_step(change, self.outer_lr, self.outer_momentum)
        self.all.set(self.all.anchor)
        self.rounds, self.loss = self.rounds + 1, None
        return loss

    @torch.no_grad()
    def catch_up(self) -> None:
        """Copy the state of a rank that has synchronised most often, if this rank has done so less often."""
        counts = exchange((self.rounds, self.steps))
        rounds, steps = max(counts)
        if min(counts)[0] == rounds >= 0:
            return
        state = torch.stack([self.all.anchor, self.all.momentum])
        broadcast(state, counts.index((rounds, steps)))
        if self.rounds < rounds or rounds < 0:
            self.all.anchor, self.all.momentum = state
            self.all.set(self.all.anchor)
            self.rounds = max(rounds, 0)
            self.steps = steps
            self.loss = None
            if not self.round_is_over():  # the others have just begun it
                self.steps = self.rounds * self.sync_every


@dataclasses.dataclass
class ElasticDiLoCoArgs(ElasticOptions):
    """DiLoCo whose workers die and come back."""

    come_back: float | None = None
    """Number of seconds after which a rank that was killed is started again, by make run and torchrun. Left
    out: it stays dead. In containers, docker start does this."""
    steps: int = 60
    """Number of steps of each worker."""
    sync_every: int = 32
    """Number H of steps between two synchronisations."""
    batch_size: int = 24
    """Number of examples in a step, over all ranks of the start; those of a dead rank are left out."""
    size: Size = "small"
    """Size of the GPT (lab/models/model.py)."""
    lr: float = 1e-3
    """Learning rate of each worker's AdamW: the factor of its update, a number without unit."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer, a number without unit; its momentum is 0.9."""
    seed: int = 0
    """Number from which the initial weights and the batches are drawn."""
    verbose: bool = False
    """Print all rows of the report (docs/report.md), not only the most important ones."""
    json: bool = False
    """Print the report as one line of JSON at the end, on stdout; everything else goes to stderr."""


def validate(cluster: Cluster, args: ElasticDiLoCoArgs, data: TrainingData) -> None:
    """Raise WorkbookError for options that make no sense, and if the ranks have different ones."""
    if dist.is_initialized():  # else this rank has died and comes back: it is in no group yet
        check_same_start(data.everything, given(args))
    validate_numbers(args.steps, args.batch_size, args.lr, args.seed, cluster.world_size)
    refuse_options(1, args.sync_every, 1, 0, "float32", args.outer_lr, 0.9, None)
    wait = args.come_back or 0.0
    refuse_if(not 0 <= wait <= MAX_SECONDS, f"--come-back {wait:g}: it is a number of seconds, 0 or more.")


def new_meter(
    args: ElasticDiLoCoArgs, data: TrainingData, ranks: int, worker: Worker, survivors: Survivors
) -> Meter:
    """Return what measures the steps of a new group; `ranks` is the number of those at the start."""
    tokens = data.tokens_per_step * len(survivors.names) // ranks
    first = worker.steps - worker.round_is_over()
    how = "diloco_elastic", args.steps, tokens, args.json
    return Meter(survivors.cluster, *how, first_step=first, round_steps=args.sync_every)


def report(args: ElasticDiLoCoArgs, meter: Meter, model: nn.Module, survivors: Survivors) -> None:
    """Print the report, and check the replicas; all ranks of the group call it."""
    digests = replica_digests(survivors.cluster, model)
    figures = meter.finish(
        survivors=survivors.names, joins=survivors.joins, sync_every=args.sync_every,
        replicas_equal=len(set(digests)) == 1, replica_digest=digests[0][:16],
    )  # fmt: skip
    meaning = f"{len(survivors.names)} ranks were there at the end, and {survivors.joins} had come back "
    meaning += "meanwhile; a synchronisation takes the mean over those who are there."
    print_report(survivors.cluster, figures, args.json, args.verbose, meaning=meaning)
    refuse_unequal(digests)


def main(cluster: Cluster, args: ElasticDiLoCoArgs) -> Worker:
    config, ranks = GPTConfig.named(args.size), cluster.world_size
    data = TrainingData("gpt", args.batch_size, args.seed, config.block_size)
    validate(cluster, args, data)
    deaths = Deaths(args.kill, ranks)
    survivors = Survivors(cluster, args.patience, takes_back=True)
    model = GPT(config, seed=args.seed + cluster.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    worker = Worker(model, optimizer, args.steps, args.sync_every, args.outer_lr)
    meter = None  # None: the group is new, and its ranks must catch up first
    while True:
        try:
            if meter is None:
                worker.catch_up()
                meter = new_meter(args, data, ranks, worker, survivors)
            if worker.is_done():
                report(args, meter, model, survivors)
                return worker
            with meter.step() as record:
                if not worker.round_is_over():
                    deaths.die_if_due(survivors.name, worker.steps)
                    x, y = (rank_slice(part, survivors.name, ranks) for part in data.batch(worker.steps))
                    record.loss = worker.step(x, y)
                survivors.check(may_join=worker.round_is_over())
                if worker.round_is_over():
                    record.loss = worker.synchronise()
        except Mismatch:
            raise  # a bug in the code, not a death
        except CommError:  # a rank has died, hangs or comes back
            meter = None
            survivors.regroup()


if __name__ == "__main__":
    start(main, ElasticDiLoCoArgs, in_a_child=True)  # or torchrun would end all ranks when it sees one die
