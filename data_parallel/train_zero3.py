"""ZeRO, stage 3, or fully sharded data parallel: a rank owns an n-th of everything and borrows the rest.

      forward     gather 0 | gather 1 | gather 2                    the next block's while this one computes
      compute              |  block 0 |  block 1 | block 2 |
      backward                                             | block 2 |  block 1  |  block 0  |
      gather                                        gather 1 | gather 0 |
      reduce-scatter                                                 |  block 2  |  block 1  | block 0

Stages 1 and 2 leave every rank with all parameters. But a block's are needed twice a step, for as long as
the block takes. In between they are freed. What comes first and last, the embeddings, the last norm, tied
weights, stays from the start of the forward to the end of the backward: it would be freed for nothing.

      memory    (P + G + O)/n and two blocks         traffic    3 (n-1)/n P: two gathers and a reduce-scatter

`reshard_after_forward=False` keeps the blocks between forward and backward: memory for one of the gathers.

All of it is in two classes here. A `Unit`, parameters of a block in one flat tensor, knows how to gather,
free and reduce-scatter. The hooks of `FullyShardedDataParallel` know when: a block's forward and the backward
that follows it are a `Turn`. What autograd keeps of a freed parameter is in freed.py, how a backward begins
and ends in any_loop.py, and state dicts and refusals are in sharded_module.py.

After Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, and Zhao et al., "PyTorch FSDP: Experiences
on Scaling Fully Sharded Data Parallel", VLDB 2023, https://arxiv.org/abs/2304.11277.
"""

import contextlib
import dataclasses
from typing import Any

import torch
from torch import nn

from comm.collectives import Group, all_gather, reduce_scatter
from comm.script import start
from data_parallel.any_loop import AnyLoop, Turn
from data_parallel.blocks import Block
from data_parallel.freed import Notes, hook_gradient, is_in_a_backward, take_gradient
from data_parallel.unit import ShardedUnit
from data_parallel.zero_run import ZeroArgs, ZeroRun, recompute_blocks
from lab.cluster import Cluster
from lab.model import loss_of
from lab.nested import map_tensors, tensors_in
from lab.text import microbatches
from lab.timeline import span


class Unit(ShardedUnit):
    """Parameters in one flat tensor: this rank's `shard` of it stays, `full` is there while it is needed."""

    def start_gather(self) -> None:
        """Begin to gather the parameters, unless they are here or it has begun."""
        if self.full is not None:
            return
        self._version = self.shard._version
        self.full = torch.empty(self.flat.numel, dtype=self.dtype, device=self.shard.device)
        mine = self.full[self.flat.mine]
        mine.copy_(self.shard)
        self._gathering = all_gather(self.full, mine, group=self.group, async_op=True, pattern=self.pattern)

    def gather(self) -> None:
        """Wait until the parameters are full."""
        self.start_gather()
        if self._gathering is not None:
            self._wait_for_gather()
            self._show()

    def free(self) -> None:
        """Give the full parameters' memory back."""
        if self._gathering is not None:  # they were prefetched, and nothing has used them
            self._wait_for_gather()
        elif self.full is not None:
            self._hide()
        self.full = None

    def _wait_for_gather(self) -> None:
        handle, self._gathering = self._gathering, None
        try:
            handle.wait()
        except BaseException:
            self.full = None  # the parameters are still freed: there is nothing to give back
            raise

    def reduce_scatter(self) -> None:
        """Start to send the full gradients to their owners: this rank gets the mean of its shard."""
        full = self.gradients.full
        shard = full.new_empty(self.flat.shard_numel)
        with span(self.name, "launch", lane="launches", bytes=full.nbytes):
            handle = reduce_scatter(
                shard, full, op="mean", group=self.group, async_op=True, pattern=self.pattern
            )
        self._arriving = shard, handle

    def wait_for_gradients(self) -> None:
        """Keep this rank's shard of the gradients; the full ones are given back."""
        (shard, handle), self._arriving = self._arriving, None
        handle.wait()
        self.gradients.keep(shard)


class FullyShardedDataParallel(AnyLoop):
    """Wraps a module; its `parameters()` are this rank's pieces, for any elementwise optimizer.

    `blocks` are gathered and freed one by one: by default the members of each ModuleList, ModuleDict and
    Sequential. Every rank must run the same blocks; within them, parameters may be tied, frozen or unused.
    `compute_dtype` is the dtype of floating-point parameters and inputs in computing and on the wire; shards,
    and with them the optimizer, keep the parameters' own, which an output in `compute_dtype` gets back.
    Buffers become rank 0's once; from then on they are each rank's own, as in FSDP2.

    Forwards and backwards may come in any number and order, as in DDP: gradients add up until the pieces' are
    cleared. Divide each microbatch's loss by their number, and call `finish_gradient_sync()` after the last
    backward: then each piece's `grad` is the mean over ranks. After an exception `zero_grad()` is enough.
    What is refused is in sharded_module.py.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        compute_dtype: torch.dtype | None = None,
        pattern: str | None = None,
        reshard_after_forward: bool = True,
        blocks: list[nn.Module] | None = None,
        unit_mb: float = 4.0,
    ) -> None:
        super().__init__(module, group, pattern, compute_dtype, blocks, unit_mb, reshard_after_forward, Unit)
        for block, inner in zip(self.blocks, self._block_modules, strict=True):
            inner.register_forward_pre_hook(lambda *_, block=block: self._before_forward(block))
            inner.register_forward_hook(lambda _, inputs, out, block=block: self._after_forward(block, out))
        for parameter in self._place:
            hook_gradient(parameter, self._on_gradient)
        self._seen: list[Block] = []  # in this forward
        self._order: list[Block] = []  # in the one before, which tells what comes next

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Gather the root for the step; the hooks of blocks gather these one by one."""
        self._seen = []
        with self._in_forward():
            self.root.start_gather()
            if self._order:
                self._order[0].start_gather()
            self.root.gather()
            with Notes(self._full_units, self._begin_backward):  # the graph keeps no full parameter
                inputs, options = map_tensors((inputs, options), self._as_computed)
                output = map_tensors(self.module(*inputs, **options), self._as_given)
        self._order = self._seen
        self._free_touched()
        self._await_backward(output)
        return output

    def _before_forward(self, block: Block) -> None:
        """Wait for the block's parameters, and prefetch the next block's."""
        if is_in_a_backward():
            block.gather()  # activations are being recomputed
            return
        self._begin_turn(block)
        block.gather()
        self._seen.append(block)
        so_far = len(self._seen)
        if self._order[:so_far] == self._seen and so_far < len(self._order):
            self._order[so_far].start_gather()

    def _after_forward(self, block: Block, output: Any) -> None:
        """Free the block, and notice when the backward comes back to it."""
        if is_in_a_backward():
            return
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, turn=block.turn: self._before_backward(turn))
        if self._reshards or not torch.is_grad_enabled():
            block.free()
            if torch.is_grad_enabled() and self._seen == self._order:
                block.start_gather()  # the last one: its backward is near

    def _before_backward(self, turn: Turn) -> None:
        """Finish the blocks whose backward is over; wait for this block's parameters; prefetch."""
        self._begin_backward()
        if turn.has_begun or turn not in self._turns:
            return  # a block with several outputs, or a second backward of one graph
        turn.has_begun, at = True, self._turns.index(turn)
        not_over = {other.block for other in self._turns if not other.has_begun} | {turn.block}
        for later in self._turns[at + 1 :]:
            if later.block not in not_over:
                later.block.finish(self._reductions)
        turn.block.gather()
        if at > 0:
            self._turns[at - 1].block.start_gather()

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Take the gradient out of the model; when its block has all of them, reduce-scatter and free."""
        self._begin_backward()
        gradient = take_gradient(parameter)
        if gradient is None:
            return  # an operation may have none for one of its inputs
        block, unit, position = self._place[parameter]
        self._used.add(parameter)
        if block.is_reduced:
            self._late.append((unit, position, gradient))  # the block was used in another one's forward
            return
        unit.gradients.put(position, gradient)
        if block is not self.root and block.reduce_complete(self._reductions):
            block.free_trained()


@dataclasses.dataclass
class Args(ZeroArgs):
    """Train a small GPT on the source of Python's standard library, everything sharded."""

    bf16: bool = False
    """Compute and communicate in bfloat16 (16 bits). The shards and the optimizer's state stay float32."""
    recompute: bool = False
    """Keep only the input of each block, and compute the block's forward again in the backward."""
    reshard_after_forward: bool = True
    """Free a block's parameters after its forward, and gather them again for its backward."""


def main(cluster: Cluster, args: Args) -> None:
    run = ZeroRun(cluster, args, "zero3")
    module = run.model()
    if args.recompute:
        recompute_blocks(module)
    model = FullyShardedDataParallel(
        module,
        compute_dtype=torch.bfloat16 if args.bf16 else None,
        pattern=run.pattern,
        reshard_after_forward=args.reshard_after_forward,
    )
    optimizer = run.optimizer_class(model.parameters(), **run.options)
    memory = run.memory(3, model, optimizer, [unit.flat for unit in model.units])
    with run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            parts = microbatches(*run.batch(step), args.grad_acc_steps)
            with run.step() as record:
                optimizer.zero_grad()
                total = torch.zeros((), device=cluster.device)
                for i, (x, y) in enumerate(parts):
                    is_last = i == len(parts) - 1
                    with contextlib.nullcontext() if is_last else model.no_sync():
                        with span("forward", "forward"), memory.forward():
                            loss = loss_of(model(x), y) / len(parts)
                        with span("backward", "backward"):
                            loss.backward()
                    total += loss.detach()
                model.finish_gradient_sync()
                if args.clip is not None:
                    model.clip_grad_norm_(args.clip)
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.mean_loss(total)
            run.expect_traffic(model.traffic_per_step(len(parts), args.clip is not None))
            run.stop_if_asked(step)
    held = memory.finish(as_json=args.json)
    with model.gathered() as full:
        run.finish(full, **held)


if __name__ == "__main__":
    start(main, Args)
