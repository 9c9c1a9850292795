"""ZeRO, stage 3, by hand: a rank keeps an n-th of everything, and has a full block only while it computes.

      forward     gather 0 ─► compute 0 ─► free 0      gather 1 ─► compute 1 ─► free 1
      backward    gather 1 ─► compute 1 ─► reduce-scatter and free 1      gather 0 ─► compute 0 ─► ...

In plain data parallel each rank has all parameters, all gradients and all of the optimizer's state. But the
parameters of a block (a transformer layer, for example) are needed only while the block computes: once in
the forward, and once in the backward. So each of the n ranks keeps an n-th of them, its shard. An all-gather
makes them full before the block computes, and afterwards they are freed. After the block's backward, a
reduce-scatter gives each rank its part of the mean gradients, and an ordinary optimizer trains the shards.
Parameters outside of all blocks, the root, are gathered before the whole module computes, and freed after it.

      memory of a rank                (P + G + O)/n, plus parameters and gradients of the root and of a block
      bytes sent in a microbatch      (n-1)/n 3 P: two all-gathers and one reduce-scatter
      P, G, O: bytes of parameters, gradients and optimizer state; AdamW in float32: 4, 4 and 8 per parameter

In the forward, autograd saves what the backward needs, parameters among it. They are views of a flat tensor,
`full`. To free it, its storage is resized to 0 bytes, and the next gather resizes it back: then whatever
autograd has saved points to the right values again. Each message is waited for; train_zero3.py hides them
behind computing. Parts: shards.py, the flat tensors; sharded_module.py, names, clipping and the full state;
memory.py, the report.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
https://arxiv.org/abs/1910.02054.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_gather, broadcast, reduce_scatter
from comm.cost import expected_traffic
from comm.script import start
from data_parallel.train_naive_grad_accumulation import accumulate
from lab.autograd import after_backward, is_in_backward
from lab.cluster import Cluster
from lab.models.blocks import blocks_of
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.memory import MemoryReport
from training.arguments import ZeroArgs
from training.guard import guarded
from training.run import Run
from zero.memory import owned, shares_of
from zero.sharded_module import ShardedModule, divide, refuse_unless_tensor
from zero.shards import FlatParameters


class Unit(FlatParameters):
    """Has the parameters of a block, or of the root: all in `full`, and this rank's in `flat_shard`."""

    def gather(self, *_: Any) -> None:
        """Collect `full` from the shards of all ranks, unless it is there."""
        if self.is_freed:
            self.full.untyped_storage().resize_(self.full.nbytes)
            all_gather(self.full, self.flat_shard, self.group)
            self.point_parameters_into(self.full)  # the module's parameters become views of it

    def end_backward(self) -> None:
        """Average the gradients, keep this rank's part, and free the rest, if the backward was here."""
        if not self.is_freed:
            mine = torch.empty_like(self.flat_shard)
            reduce_scatter(mine, self.take_gradients(), "mean", self.group)
            self.layout.add_gradient(self.shards, mine)
            self.free()


@guarded
class TextbookFullyShardedDataParallel(ShardedModule):
    """Wraps a module. Its `parameters()` are this rank's shards, one of each parameter.

    Train them with any optimizer that updates each number on its own, such as SGD or Adam. The blocks are the
    members of each outermost ModuleList and Sequential. All ranks must run the same blocks, and blocks and
    module must return one tensor. After a backward the `grad` of each shard is the mean over ranks, with
    zeros for an unused parameter of a block that was used. Microbatches add up.
    """

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__()
        self.module, self.group = module, group
        for buffer in module.buffers():
            broadcast(buffer, root=0, group=group)
        blocks = blocks_of(module)
        parts = zip([module, *blocks], divide(module, blocks), strict=True)
        units = {part: Unit(parameters, group) for part, parameters in parts if parameters}
        for part, unit in units.items():
            part.register_forward_pre_hook(unit.gather)
            part.register_forward_hook(partial(self._after_forward, unit))
        self.units: list[Unit] = list(units.values())
        self.blocks = [unit for part, unit in units.items() if part is not module]
        self.parameter_shards = [shard for unit in self.units for shard in unit.shards]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module, whose hooks gather and free the root and the blocks."""
        output = self.module(*inputs, **options)
        refuse_unless_tensor(output)
        if output.requires_grad:
            output.register_hook(lambda _: after_backward(self.end_backward))
        return output

    def _after_forward(self, unit: Unit, part: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Free the block's parameters, and notice when the backward reaches its output."""
        refuse_unless_tensor(output)
        output = output.view_as(output)  # a tensor of this block's own: another one may return the same
        if output.requires_grad:
            output.register_hook(lambda _: self._before_backward(unit))
        if not is_in_backward():  # a checkpoint computes the block again there, before its backward
            unit.free()
        return output

    def _before_backward(self, unit: Unit) -> None:
        """End the backward of the block that computed later in the forward, and gather this one again."""
        for block in self.blocks:
            if block is not unit:
                block.end_backward()
        unit.gather()

    def end_backward(self) -> None:
        """End the backward of the first block, and then of the root: all gradients are averaged."""
        for unit in reversed(self.units):
            unit.end_backward()

    def traffic(self, microbatches: int = 1, is_clipped: bool = False) -> Traffic:
        """Return what a rank sends in a step: two all-gathers and a reduce-scatter in each microbatch."""
        total = expected_traffic("all_reduce", None, 1, 8, self.group) if is_clipped else Traffic()
        for unit in self.units:
            for op in ("all_gather", "all_gather", "reduce_scatter"):
                sent = expected_traffic(op, None, unit.full.numel(), unit.full.itemsize, self.group)
                total += sent * microbatches
        return total


def main(cluster: Cluster, args: ZeroArgs) -> None:
    run = Run(cluster, args, "zero3_textbook")
    module = run.model()
    model = TextbookFullyShardedDataParallel(module)
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
    start(main, ZeroArgs)
