"""ZeRO, stage 3 (fully sharded): a rank keeps an n-th of everything, and gathers the rest when it is needed.

      forward    compute                | embed  | block 0 | block 1 | block 2 | head   |
                 all-gather      root   | 0      | 1       | 2       |         |        |

      backward   compute                | head   | block 2 | block 1 | block 0 | embed  |
                 all-gather             |        | 1       | 0       |         |        |
                 reduce-scatter         |        |         | 2       | 1       |        | 0, root

train_zero3_textbook.py gathers a block before its forward and before its backward, frees it afterwards, and
waits for each message. Here messages are hidden behind computing. While one block computes, the next one is
gathered (prefetched): in the forward the one registered after it, in the backward the one before it. A
block's gradients are sent when the backward reaches the block before it; those of the first block and of the
root when the backward has ended. These moments are the same on all ranks, also where a rank does not use all
parameters.

The root has the parameters that belong to no block, or to several: embeddings ("embed" in the picture), the
last norm and the head ("head"). It stays full from the start of the forward to the end of the backward,
because both need it at both ends. The last block stays full in between, too: the backward starts there.

      memory of a rank    (P + G + O)/n, and for a time full parameters of root and two blocks, and gradients
                          of root and three
      bytes sent          (n-1)/n (3 P - root - last block) for each backward: two gathers, one reduce-scatter
      P, G, O: bytes of all parameters, gradients and optimizer state; what is sent has `compute_dtype`

`reshard_after_forward=False` keeps the blocks full between forward and backward. That takes up to P more
memory, and saves their second gather. Parts: shards.py, the layout; sharded_module.py, what both versions of
stage 3 have in common; memory.py, the report.

After Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, and Zhao et al., "PyTorch FSDP: Experiences
on Scaling Fully Sharded Data Parallel", VLDB 2023, https://arxiv.org/abs/2304.11277.
"""

import dataclasses
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group, Work, all_gather, broadcast, reduce_scatter
from comm.cost import expected_traffic
from comm.script import start
from data_parallel.train_naive_grad_accumulation import accumulate
from lab.autograd import after_backward, is_in_backward
from lab.cluster import Cluster
from lab.models.blocks import blocks_of, recompute_blocks
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.memory import MemoryReport
from training.arguments import ZeroArgs
from training.guard import guarded
from training.run import Run
from zero.memory import owned, shares_of
from zero.sharded_module import ShardedModule, divide, refuse_hidden, tensors_in
from zero.shards import FlatParameters

MOST_IN_FLIGHT = 2  # without a limit, the full gradients of all blocks would wait in memory for a slow link


class Unit(FlatParameters):
    """Has some parameters in `full` while they are needed; this rank keeps its `flat_shard`.

    freed ── start_gather ──► on their way ── gather ──► full: the module's parameters are views of `full`
      ▲                                                    │
      └────────────────────── free ────────────────────────┘
    """

    number = -1  # among the model's units; ranks must gather the same one
    _gathering: Work | None = None
    _gathered_version = 0  # of the shard: torch counts its changes, and guard.py those by fused optimizers

    @property
    def is_full(self) -> bool:
        return not self.is_freed and self._gathering is None

    def start_gather(self) -> None:
        """Start to gather the parameters, unless that has been done."""
        if self._gathered_version != self.flat_shard._version and not self.is_freed:
            self.free()  # it stayed full after a forward without a backward
        if self.is_freed:
            self._gathered_version = self.flat_shard._version
            self.full.untyped_storage().resize_(self.full.nbytes)
            mine = self.full[self.layout.mine].copy_(self.flat_shard)
            self._gathering = all_gather(self.full, mine, self.group, async_op=True, tensor_id=self.number)

    def gather(self) -> None:
        """Wait until all of `full` is there, and let the module compute with it."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self.point_parameters_into(self.full)

    def free(self) -> None:
        """Free the full parameters, also those that are still on their way."""
        if self._gathering is not None:  # prefetched, but not used
            self._gathering.wait()
            self._gathering = None
        super().free()

    def reduce_scatter(self) -> tuple[Tensor, Work]:
        """Take the gradients out of the module, and start to average them; return this rank's part."""
        gradients = self.take_gradients()
        mine = gradients[self.layout.mine]
        return mine, reduce_scatter(mine, gradients, "mean", self.group, async_op=True)


@guarded
class FullyShardedDataParallel(ShardedModule):
    """Wraps a module. Its `parameters()` are this rank's shards, one of each parameter.

    Give them to any optimizer that updates each number on its own, such as SGD or Adam. `blocks` are
    gathered and freed one by one; by default they are the members of each ModuleList and Sequential. All
    ranks must run the same blocks. With `compute_dtype`, parameters and inputs are cast to it for computing
    and for sending, and outputs are cast back; shards and optimizer keep the dtype of the parameters.

    After a backward the `grad` of each shard is the mean over ranks, with zeros for an unused parameter; the
    means of several microbatches add up.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        blocks: list[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.module, self.group, self.compute_dtype = module, group, compute_dtype
        self.reshards = reshard_after_forward
        for buffer in module.buffers():
            broadcast(buffer, root=0, group=group)
        modules = blocks_of(module) if blocks is None else blocks
        # Number 0 is the root.
        self.blocks = [units_of(some, group, compute_dtype) for some in divide(module, modules)]
        self.units: list[Unit] = [unit for block in self.blocks for unit in block]
        for number, unit in enumerate(self.units):
            unit.number = number
        self.parameter_shards = [shard for unit in self.units for shard in unit.shards]
        self._current: list[Unit] = []  # the block that the backward has reached
        self._in_flight = deque[tuple[Unit, Tensor, Work]]()
        self._has_backward = False  # whose gradients are not all averaged
        for i, part in enumerate([module, *modules]):
            part.register_forward_pre_hook(partial(self._before_forward, i))
            part.register_forward_hook(partial(self._after_forward, i))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module, whose hooks gather the root and the blocks."""
        if self._has_backward:  # an error has ended it, and its gradients are worth nothing
            self.end_backward()
            self.zero_grad()
        return self.compute(inputs, options)

    def _before_forward(self, i: int, *_: Any) -> None:
        """Wait for the block's parameters, and prefetch those of the next block."""
        for unit in self.blocks[i]:
            unit.gather()
        if i + 1 < len(self.blocks) and not is_in_backward():  # which recomputes activations
            for unit in self.blocks[i + 1]:
                unit.start_gather()

    def _after_forward(self, i: int, _: nn.Module, inputs: Any, output: Any) -> None:
        """Free the block, unless the backward begins with it. Notice when the backward reaches its output."""
        # If a block returns its input, the tensor has a hook of the block that made it. One more would send
        # that block's gradients too early.
        passed_on, tensors = tensors_in(inputs), tensors_in(output)
        refuse_hidden(output, tensors)
        for tensor in tensors:
            if tensor.requires_grad and not any(tensor is other for other in passed_on):
                tensor.register_hook(partial(self._before_backward, i))
        if is_in_backward():  # a checkpoint has computed the block again, and the backward needs it
            return
        is_needed = not self.reshards or i in (0, len(self.blocks) - 1)
        if not (is_needed and torch.is_grad_enabled()):
            for unit in self.blocks[i]:
                unit.free()

    def _before_backward(self, i: int, _: Tensor) -> None:
        """Wait for the block's parameters, prefetch, and send the gradients of the block before it."""
        if not self._has_backward:
            self._has_backward = True
            after_backward(self.end_backward)
        done: list[Unit] = []
        # Once per block: each of its outputs has this hook. The root is sent at the end.
        if i > 0 and self._current is not self.blocks[i]:
            done, self._current = self._current, self.blocks[i]
        for unit in done:
            unit.free()
        for unit in self.blocks[i]:
            unit.gather()
        for unit in self.blocks[i - 1] if i > 1 else []:
            unit.start_gather()
        self._reduce(done)

    @torch.no_grad()
    def _reduce(self, block: list[Unit]) -> None:
        """Start to average the block's gradients, when fewer than MOST_IN_FLIGHT units are in flight."""
        for unit in block:
            if unit.layout.is_trained:
                if len(self._in_flight) == MOST_IN_FLIGHT:
                    self._wait_for_oldest()
                self._in_flight.append((unit, *unit.reduce_scatter()))

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest reduce-scatter, and keep this rank's part of the mean gradients."""
        unit, mine, work = self._in_flight.popleft()
        work.wait()
        self._keep(unit, mine.clone())  # a view would keep all of the full gradients in memory

    def _keep(self, unit: Unit, mine: Tensor) -> None:
        """Add this rank's part of the mean gradients to that of earlier microbatches."""
        unit.layout.add_gradient(unit.shards, mine)

    def end_backward(self) -> None:
        """Free all parameters, and average the gradients that are left of the backward."""
        for unit in self.units:
            unit.free()
        self._reduce(self._current)
        self._reduce(self.blocks[0])
        self._current = []
        while self._in_flight:
            self._wait_for_oldest()
        self._has_backward = False

    def traffic(self, microbatches: int = 1, is_clipped: bool = False) -> Traffic:
        """Return what a rank sends in a step: a block is gathered twice in each microbatch."""
        total = expected_traffic("all_reduce", None, 1, 8, self.group) if is_clipped else Traffic()
        for i, block in enumerate(self.blocks):
            gathers = 2 if self.reshards and 0 < i < len(self.blocks) - 1 else 1
            for unit in block:
                size = unit.full.numel(), unit.full.itemsize, self.group
                total += expected_traffic("all_gather", None, *size) * gathers * microbatches
                if unit.layout.is_trained:
                    total += expected_traffic("reduce_scatter", None, *size) * microbatches
        return total


def units_of(parameters: list[nn.Parameter], group: Group, compute_dtype: torch.dtype | None) -> list[Unit]:
    """Return the units of a block: usually one; frozen parameters and other dtypes need their own."""
    kinds: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault((p.requires_grad, p.dtype), []).append(p)
    return [Unit(kind, group, compute_dtype or dtype) for (_, dtype), kind in kinds.items()]


@dataclasses.dataclass
class Args(ZeroArgs):
    """Train a small GPT on the source of Python's standard library, with everything sharded."""

    bf16: bool = False
    """Compute and communicate in bfloat16 (16 bits). The shards and the optimizer's state stay float32."""
    recompute: bool = False
    """Keep only the input of each block, and compute the block's forward again in the backward."""
    reshard_after_forward: bool = True
    """Free a block's parameters after its forward, and gather them again for its backward."""


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "zero3")
    module = run.model()
    if args.recompute:
        recompute_blocks(module)
    dtype = torch.bfloat16 if args.bf16 else None
    model = FullyShardedDataParallel(module, None, dtype, args.reshard_after_forward)
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
    run.finish(model, traffic=sent, **memory.fields())


if __name__ == "__main__":
    start(main, Args)
