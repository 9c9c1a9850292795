"""Hybrid sharding (HSDP): shards within a machine, replicas between machines.

                  machine 0                      machine 1
      shards      rank 0    rank 1               rank 2    rank 3       gather parameters, reduce-scatter
                  1st half  2nd half             1st half  2nd half     gradients: fast links
                     │         │                    │         │
      replicas       └─────────┼── all-reduce of ───┘         │         only the gradients of a shard:
                               └── the shards of gradients ───┘         the slow network

ZeRO 3 on all n ranks sends every parameter twice and every gradient once, and most of it leaves the machine.
Here m ranks of a machine divide everything among them, and each of the n/m machines has a copy. Parameters
never leave a machine. Of the gradients a rank sends only those of its shard, when they are the mean over its
machine already:

                        within a machine               between machines
      ZeRO 3            with P bytes of parameters, 3 (n-1)/n P in all, over every link of the ring
      HSDP              3 (m-1)/m P                    2 (n/m - 1)/(n/m) P/m
      memory            ZeRO 3: a rank has an n-th of the parameters, gradients and state; HSDP: an m-th

With two machines of 8 GPUs that is P/8 over the network for each rank, where ZeRO 3 sends 2.8 P over some
links. The price is memory. ZeRO++ keeps ZeRO 3's shards of state, and a second copy of the parameters within
each machine (Wang et al. 2023, https://arxiv.org/abs/2306.10209).

The class is FullyShardedDataParallel (zero/train_zero3.py) on the ranks of a machine. When the mean gradients
of a unit's shard have arrived, their all-reduce between the machines begins, and the backward goes on.

Zhao et al., "PyTorch FSDP", 2023, https://arxiv.org/abs/2304.11277, section 3.2.2 (hybrid sharding). torch:
`fully_shard(module, mesh=...)` with a mesh of two dimensions.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.algorithms.hierarchical import ranks_by_host
from comm.collectives import Group, Work, all_reduce, broadcast
from comm.cost import expected_traffic
from comm.script import start
from comm.wire import slow_link
from comm.wire.groups import own_group
from comm.wire.hosts import hosts_of
from comm.wire.wire import peer_wire
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.memory import MemoryReport
from lab.trace.timeline import span
from training.arguments import ZeroArgs
from training.run import Run
from zero.memory import owned, shares_of
from zero.train_zero3 import FullyShardedDataParallel, Unit
from zero.train_zero3 import traffic_per_step as traffic_of_shards


class HybridShardedDataParallel(FullyShardedDataParallel):
    """Shards a module among the ranks of `shard_group`, and averages gradients over `replicas`.

    `replicas` are the ranks that have the same shard, one on each machine. It is used as
    FullyShardedDataParallel; after `finish_gradient_sync()` the `grad` of a shard is the mean over all ranks.
    Inside `no_sync()` gradients are reduced within the machine only, and add up there.
    """

    def __init__(self, module: nn.Module, shard_group: Group, replicas: Group, **options: Any) -> None:
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=replicas)
        super().__init__(module, shard_group, **options)
        self.replicas = replicas
        self._averages = True  # False inside no_sync()
        self._earlier: dict[Unit, Tensor] = {}  # gradients of earlier microbatches, means over the machine
        self._averaging: list[tuple[Unit, Tensor, Work]] = []

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run all microbatches but the last inside: their gradients stay within the machine."""
        self._averages = False
        with super().no_sync():
            yield
        self._averages = True

    def _complete(self, unit: Unit) -> None:
        """Wait for the machine's mean gradients of a shard, and start to average them over machines."""
        mine = unit.wait_for_gradients().clone()  # a view would keep all of the full gradients in memory
        if unit in self._earlier:
            mine += self._earlier.pop(unit)
        if self._averages:
            work = all_reduce(mine, "mean", self.replicas, async_op=True, pattern=self.pattern)
            self._averaging.append((unit, mine, work))
        else:
            self._earlier[unit] = mine

    def finish_gradient_sync(self) -> None:
        """Wait until the `grad` of each shard is the mean over all ranks."""
        super().finish_gradient_sync()
        for unit, mine, work in self._averaging:
            work.wait()
            unit.add_gradients(mine)
        self._averaging.clear()


def groups_of(cluster: Cluster, shard_size: int | None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of this rank: those that share its machine, and those with the same shard.

    `shard_size` neighbours stand for a machine. None: the machines are found by their names (wire/hosts.py);
    if there is only one, each half of the ranks stands for one.
    """
    n = cluster.world_size
    if shard_size is None:
        machines = ranks_by_host(hosts_of(peer_wire(None)))
        if len(machines) == 1 and n % 2 == 0:
            machines = [list(range(n // 2)), list(range(n // 2, n))]
        sizes = {len(ranks) for ranks in machines}
        if len(sizes) > 1:
            raise WorkbookError(
                f"The machines have {', '.join(str(len(ranks)) for ranks in machines)} ranks: hybrid "
                "sharding needs equally many on each; give --shard-size."
            )
    else:
        if shard_size < 1 or n % shard_size:
            raise WorkbookError(f"--shard-size {shard_size}: it must divide the number of ranks, {n}.")
        machines = [list(range(first, first + shard_size)) for first in range(0, n, shard_size)]
    same_shard = [list(ranks) for ranks in zip(*machines, strict=True)]
    return own_group(machines, "shards"), own_group(same_shard, "replicas")


@dataclasses.dataclass
class Args(ZeroArgs):
    """Train a small GPT, sharded within each machine, with a replica on each machine."""

    shard_size: int | None = None
    """Number of neighbouring ranks that stand for a machine. None: machines are found by their names; if
    there is only one, each half of the ranks stands for one."""


def traffic_per_step(model: HybridShardedDataParallel, microbatches: int, is_clipped: bool) -> Traffic:
    """Return what this rank is expected to send in a step."""
    total = traffic_of_shards(model, microbatches, is_clipped)
    for unit in model.units:
        if unit.layout.is_trained:
            size = unit.shard.numel(), unit.full.itemsize
            total += expected_traffic("all_reduce", model.pattern, *size, model.replicas)
    return total


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "hsdp")
    module = run.model()
    shard_group, replicas = groups_of(cluster, args.shard_size)
    slow_link.spare(shard_group)  # --link is the network between machines
    model = HybridShardedDataParallel(module, shard_group, replicas, pattern=run.pattern)
    optimizer_class, options = args.optimizer_class()
    optimizer = optimizer_class(model.parameters(), **options)
    shares = shares_of(module, model.parameter_shards)
    memory = MemoryReport(model, optimizer, owned(3, shares, args.states))
    with run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            parts = microbatches(x, y, args.grad_acc_steps)
            with run.step() as record:
                num_targets = run.valid_targets(y)
                optimizer.zero_grad()
                total = torch.zeros((), device=cluster.device)
                for i, (x, y) in enumerate(parts):
                    is_last = i == len(parts) - 1
                    with contextlib.nullcontext() if is_last else model.no_sync():
                        with span("forward", "forward"), memory.forward():
                            loss = loss_of(model(x), y, num_targets)
                        with span("backward", "backward"):
                            loss.backward()
                    total += loss.detach()
                model.finish_gradient_sync()
                if args.clip is not None:
                    model.clip_grad_norm_(args.clip)
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.mean_loss(total)
            run.expect_traffic(traffic_per_step(model, len(parts), args.clip is not None))
            run.evaluate(step, model)
            run.stop_if_asked(step)
    run.finish(model, machines=dist.get_world_size(replicas), **memory.fields())


if __name__ == "__main__":
    start(main, Args)
