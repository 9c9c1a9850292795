"""Naive data parallel: the same model everywhere, another slice of the batch each, one mean gradient.

      rank 0   slice 0 ─► forward ─► backward ─► gradient ─┐               ┌─► step
      rank 1   slice 1 ─► forward ─► backward ─► gradient ─┼─ all-reduce ──┼─► step     the same step
      rank 2   slice 2 ─► forward ─► backward ─► gradient ─┘     mean      └─► step

Three things make it equal to one process with the whole batch: the ranks start from rank 0's weights, their
slices are equal and together the batch, and each gradient is the *mean* over ranks. Then every rank
takes the same step, and the replicas stay equal bit for bit: no weights are ever sent again.

It is naive because it starts to communicate when all computing is done, a message for each parameter:

      cost per step = sum over parameters of 2 (n-1) (alpha + bytes/n beta)      (a ring; comm.cost)

Each of these terms has a cure: the latencies buckets, the waiting overlap. See Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

import contextlib
import dataclasses
from typing import Literal

import torch
import tyro
from torch import Tensor, nn

from comm import cost
from comm.collectives import Group, all_reduce, broadcast, default_pattern
from comm.rendezvous import joined
from lab import timeline
from lab.check import digest, replicas_equal
from lab.cluster import Cluster
from lab.ledger import Traffic
from lab.meter import Meter
from lab.model import GPT, GPTConfig, loss_of
from lab.text import check_same_corpus, global_batch, load_corpus, rank_slice, split
from lab.timeline import span

TRACED = range(2, 5)  # steps: the first ones warm up, and more make no clearer picture


class NaiveDataParallel(nn.Module):
    """Wraps a module that every rank of `group` holds; any shapes, tied, frozen and unused parameters.

    Call `finish_gradient_sync()` after the (last) backward: then every `param.grad` is the mean over ranks.
    With several microbatches divide each one's loss by their number, as on one process.
    `pattern` says who reduces (comm.collectives).
    """

    def __init__(self, module: nn.Module, group: Group = None, pattern: str | None = None) -> None:
        super().__init__()
        self.module, self.group, self.pattern = module, group, pattern
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For all but the last microbatch. Here nothing is sent before `finish_gradient_sync` anyway."""
        return contextlib.nullcontext()

    def finish_gradient_sync(self) -> None:
        """Average the gradients, parameter by parameter.

        A parameter that only some ranks used counts as zero on the others; one that no rank used keeps no
        gradient. The ranks must agree on that first, or they would wait for different parameters.
        """
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8)
        used = used.to(trained[0].device) if trained else used
        all_reduce(used, op="max", group=self.group, pattern=self.pattern)
        for parameter, is_used in zip(trained, used.tolist(), strict=True):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                all_reduce(parameter.grad, op="mean", group=self.group, pattern=self.pattern)


@dataclasses.dataclass
class Args:
    """Naive data parallel: train a small GPT on the source of Python's standard library."""

    steps: int = 60
    batch_size: int = 24
    """Windows of text in a step, over all ranks: the same batch whatever their number."""
    size: Literal["tiny", "small", "13m"] = "small"
    """Of the model (lab.model)."""
    lr: float = 1e-3
    seed: int = 0
    pattern: (
        Literal["ring", "tcp", "tree", "flat", "recursive_doubling", "halving_doubling", "torch"] | None
    ) = None
    """Who reduces (comm.collectives); None is ring on gloo, torch on nccl."""
    trace: str | None = None
    """A folder for trace.json (Perfetto) and timeline.png."""
    json: bool = False
    """Print the summary as one JSON line at the end."""


def traffic_per_step(cluster: Cluster, model: nn.Module, pattern: str) -> Traffic:
    """What the formula says this rank sends in a step: which are used, every gradient, the loss."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = [(len(trained), 1), *((p.numel(), p.element_size()) for p in trained), (1, 4)]
    place = (cluster.world_size, cluster.rank)
    return sum((cost.per_rank("all_reduce", pattern, *size, *place) for size in sizes), Traffic())


def main(cluster: Cluster, args: Args) -> None:
    corpus = load_corpus()
    check_same_corpus(cluster, corpus)
    train, _ = split(corpus)
    config = GPTConfig.named(args.size)
    # Another seed on each rank, as a careless user might have it: the broadcast makes them equal.
    model = NaiveDataParallel(
        GPT(config, seed=args.seed + cluster.rank).to(cluster.device), pattern=args.pattern
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    meter = Meter(
        cluster, "data_parallel_naive", args.steps, args.batch_size * config.block_size, as_json=args.json
    )

    for step in range(args.steps):
        if args.trace and step == TRACED.start:
            timeline.start_recording()
        if step == TRACED.stop:
            timeline.stop_recording()
        batch = global_batch(train, args.seed, step, args.batch_size, config.block_size)
        x, y = (rank_slice(part, cluster.rank, cluster.world_size).to(cluster.device) for part in batch)
        with meter.step() as this:
            with span("forward", "forward"):
                loss = loss_of(model(x), y)
            optimizer.zero_grad()
            with span("backward", "backward"):
                loss.backward()
            with span("sync", "wait"):
                model.finish_gradient_sync()
            with span("step", "optimizer"):
                optimizer.step()
            this.loss = loss.detach()
            all_reduce(this.loss, op="mean", pattern=args.pattern)

    formula = traffic_per_step(cluster, model, args.pattern or default_pattern("all_reduce"))
    equal = replicas_equal(cluster, model)
    meter.finish(
        bytes_formula=formula.bytes_sent * args.steps,
        messages_formula=formula.messages_sent * args.steps,
        replicas_equal=equal,
        replica_digest=digest(model)[:16],
    )
    if args.trace:
        timeline.save(cluster, args.trace, title=f"Naive data parallel, {cluster.world_size} ranks")


if __name__ == "__main__":
    settings = tyro.cli(Args)
    with joined() as this_cluster:
        main(this_cluster, settings)
