"""Hybrid sharding (HSDP): shards within a machine, and a replica on each machine.

                    machine 0                 machine 1
      shards        rank 0 ◄──► rank 1        rank 2 ◄──► rank 3     fast links: gather parameters,
                      ▲           ▲             ▲           ▲        reduce-scatter gradients
      replicas        └───────────┼─────────────┘           │
                                  └─────────────────────────┘        slow network: all-reduce gradients of
                                                                     shards

ZeRO 3 divides everything among all n ranks, so its gathers cross the network between machines. Here the m
ranks of a machine divide everything among them, and each of the k machines has a full copy. Parameters never
leave a machine. Gradients leave it once, when they are the mean over the machine already: a rank all-reduces
those of its shard with the ranks of other machines that have the same shard.

      bytes in a step                   ZeRO 3            HSDP
      a rank sends, in all              3 (n-1)/n P       3 (m-1)/m P + 2 (k-1)/k P/m
      a machine sends to others         3 (n-1)/n P       2 (k-1)/k P
      a rank keeps                      (P + G + O)/n     (P + G + O)/m
      P, G, O: bytes of all parameters, gradients and optimizer state; n = k m

3 P is two gathers and a reduce-scatter. (A block that is gathered only once saves a gather:
zero/train_zero3.py.) In ZeRO 3's ring the last rank of a machine has its right neighbour on the next machine,
so all that this rank sends leaves its machine. On 2 machines of 8 ranks, a machine sends 2.8 P to the other
one with ZeRO 3, and P with HSDP. With more microbatches ZeRO 3 sends as much again in each; HSDP sends that
within a machine only, and the bytes between machines stay the same.

The price is memory: a rank keeps k times as much. ZeRO++ pays less. It divides gradients and state among all
ranks, and only the parameters have a copy in each machine, for the gathers of the backward (Wang et al. 2023,
https://arxiv.org/abs/2306.10209).

The class is FullyShardedDataParallel (zero/train_zero3.py) among the ranks of a machine. When the machine's
mean gradients of a unit have arrived, their all-reduce begins, and the backward goes on. With --link, the
ranks of a machine share its link to the others, and what stays within a machine is not slowed down.

Zhao et al., "PyTorch FSDP", 2023, https://arxiv.org/abs/2304.11277, section 3.2.2 (hybrid sharding, and its
bytes). torch: `fully_shard(module, mesh=...)` with a mesh of two dimensions.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.algorithms.hierarchical import ranks_by_host
from comm.collectives import Group, Work, all_gather, all_reduce, broadcast, use_pattern
from comm.cost import expected_traffic
from comm.script import start
from comm.wire import slow_link
from comm.wire.groups import own_group
from comm.wire.hosts import own_host
from data_parallel.train_naive_grad_accumulation import accumulate
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.memory import MemoryReport
from training.arguments import ZeroArgs
from training.guard import guarded
from training.run import Run
from zero.memory import owned, shares_of
from zero.train_zero3 import FullyShardedDataParallel, Unit


@guarded
class HybridShardedDataParallel(FullyShardedDataParallel):
    """Shards a module among the ranks of `shard_group`, and averages gradients over `replicas`.

    `replicas` are the ranks that have the same shard, one on each machine. It is used as
    FullyShardedDataParallel, whose options it takes. After `finish_gradient_sync()` the `grad` of each shard
    is the mean over all ranks.
    """

    def __init__(self, module: nn.Module, shard_group: Group, replicas: Group, **options: Any) -> None:
        super().__init__(module, shard_group, **options)
        self.replicas = replicas
        for tensor in [*module.buffers(), *(unit.flat_shard for unit in self.units)]:
            broadcast(tensor, root=0, group=replicas)
        # Units whose gradients are not yet averaged over machines. A dict keeps their order, a set does not.
        self._in_machine: dict[Unit, None] = {}
        self._averaging: list[tuple[Unit, Tensor, Work]] = []
        self.require_backward_grad_sync = True  # DDP's name; False in all microbatches but the last

    def _keep(self, unit: Unit, mine: Tensor) -> None:
        """Add the machine's mean gradients of a unit to the shards, and start to average over machines."""
        super()._keep(unit, mine)
        self._in_machine[unit] = None
        if self.require_backward_grad_sync:  # those of earlier microbatches do not leave the machine
            self._average(unit)

    def _average(self, unit: Unit) -> None:
        """Start to average the gradients of this rank's shard over machines."""
        del self._in_machine[unit]
        mine = unit.layout.take_gradient(unit.shards, unit.full.dtype)
        self._averaging.append((unit, mine, all_reduce(mine, "mean", self.replicas, async_op=True)))

    def finish_gradient_sync(self) -> None:
        """Wait until the `grad` of each shard is the mean over all ranks."""
        for unit in list(self._in_machine):  # no last microbatch has sent these
            self._average(unit)
        for unit, mine, work in self._averaging:
            work.wait()
            unit.layout.add_gradient(unit.shards, mine)
        self._averaging.clear()

    def traffic(self, microbatches: int = 1, is_clipped: bool = False) -> Traffic:
        """Return what a rank sends in a step: in its machine as ZeRO 3, and an all-reduce of its shards."""
        total = super().traffic(microbatches, is_clipped)
        for unit in self.units:
            if unit.layout.is_trained:
                size = unit.flat_shard.numel(), unit.full.itemsize
                total += expected_traffic("all_reduce", None, *size, self.replicas)
        return total


def machine_groups(cluster: Cluster, shard_size: int | None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return two groups of this rank: the ranks of its machine, and those that have the same shard.

    `shard_size` neighbours stand for a machine. None: machines are found by their names (comm/wire/hosts.py),
    and if there is only one, each half of an even number of ranks stands for one. All ranks must call it.
    """
    n = cluster.world_size
    if shard_size is None:
        hosts = torch.zeros(n, dtype=torch.int64, device=cluster.device)
        all_gather(hosts, torch.tensor([own_host()], device=cluster.device))
        machines = ranks_by_host(hosts.tolist())
        if len(machines) == 1 and n % 2 == 0:
            shard_size = n // 2
    if shard_size is not None:
        if shard_size < 1 or n % shard_size:
            raise WorkbookError(f"--shard-size {shard_size}: it must divide the number of ranks, {n}.")
        machines = [list(range(first, first + shard_size)) for first in range(0, n, shard_size)]
    if len({len(ranks) for ranks in machines}) > 1:
        numbers = ", ".join(str(len(ranks)) for ranks in machines)
        raise WorkbookError(
            f"The machines have {numbers} ranks, and hybrid sharding needs equally many on each: start as "
            "many on each, or give a --shard-size."
        )
    same_shard = [list(ranks) for ranks in zip(*machines, strict=True)]
    return own_group(machines, "shards"), own_group(same_shard, "replicas")


@dataclasses.dataclass
class Args(ZeroArgs):
    """Train a small GPT, sharded within each machine, with a replica on each machine."""

    shard_size: int | None = None
    """Number of neighbouring ranks that stand for a machine. Left out: machines are found by their names; if
    there is only one, each half of an even number of ranks stands for one."""


def sent_along(run: Run) -> dict[str, Any]:
    """Return, for the report, what this rank has sent within its machine, and to other machines."""
    rows = [(entry.axis, traffic.bytes_sent) for entry, traffic in run.traffic.items()]
    inside, outside = (sum(sent for its, sent in rows if its == axis) for axis in ("shards", "replicas"))
    figures: dict[str, Any] = {"shards_bytes_sent": inside, "replicas_bytes_sent": outside}
    if outside:
        share = f"{outside / (inside + outside):.0%} of what rank 0 sent left its machine"
        figures["meaning"] = f"{share}: gradients of its shard, averaged there before."
    return figures


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "hsdp")
    module = run.model()
    shard_group, replicas = machine_groups(cluster, args.shard_size)
    slow_link.exempt(shard_group)  # --link is a machine's link to the others
    slow_link.share(replicas, dist.get_world_size(shard_group))
    for group in (shard_group, replicas):
        use_pattern(args.pattern, group)
    model = HybridShardedDataParallel(module, shard_group, replicas)
    optimizer = run.optimizer(model)
    memory = MemoryReport(model, optimizer, owned(3, shares_of(module, model.parameter_shards), args.states))
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        loss = accumulate(model, microbatches(x, y, args.grad_acc_steps), run.num_targets)
        model.finish_gradient_sync()
        if args.clip is not None:
            model.clip_grad_norm_(args.clip)
        optimizer.step()
        run.record(loss)
    sent = model.traffic(args.grad_acc_steps, args.clip is not None)
    machines = dist.get_world_size(replicas)
    run.finish(model, traffic=sent, machines=machines, **sent_along(run), **memory.fields())


if __name__ == "__main__":
    start(main, Args)
