"""ZeRO, stage 3 (fully sharded): a rank keeps an n-th of everything, and gathers the rest when it is needed.

      forward    compute                | first  | block 0 | block 1 | block 2 | last   |
                 all-gather      root   | 0      | 1       | 2       |         | 2      |

      backward   compute                | last   | block 2 | block 1 | block 0 | first  |
                 all-gather             |        | 1       | 0       |         |        |
                 reduce-scatter         |        |  2      |  1      |  0      |        | root

Stages 1 and 2 leave all parameters on every rank. But the parameters of a block (a transformer layer, for
example) are needed only while the block computes, twice in a step. In between they are freed. While one
block computes, the next one is gathered (prefetched), in the order of the previous forward; so the first
forward prefetches nothing.

The root has the parameters of no block or of several: embeddings (first in the picture), the last norm and
the head (last). It stays full from the start of the forward to the end of the backward, which begins and
ends with it.

      memory of a rank    (P + G + O)/n, and for a time full parameters and gradients of root and two blocks
      bytes sent          (n-1)/n (3 P - root) for each backward: two gathers (root: one), one reduce-scatter
      P, G, O: bytes of all parameters, gradients and optimizer state; what is sent has `compute_dtype`

`reshard_after_forward=False` keeps the blocks full between forward and backward. That takes up to P more
memory, and saves their second gather. `no_sync()` changes nothing: there is no memory for full gradients, so
each microbatch sends its own.

The algorithm is in two classes. A `Unit` is a flat tensor of parameters that are gathered, freed and
reduce-scattered together. A block has one unit or several, of about `unit_mb`, so that a block's first
gradients are sent while others are computed (blocks.py). The hooks of `FullyShardedDataParallel` decide
when. A `Turn` is one forward of a block and the backward that follows it. At the end of a backward,
any_loop.py reduces the root and waits for all reductions; then the pieces have this rank's part of the mean
gradient. freed.py (`Notes`) has hooks that keep autograd from saving full parameters. State dicts, and the
uses that raise an error, are in sharded_module.py.

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
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.models.nested import map_tensors, tensors_in
from lab.models.text import microbatches
from lab.trace.timeline import span
from zero.any_loop import AnyLoop, Turn
from zero.blocks import ShardedBlock
from zero.freed import Notes, hook_gradient, is_in_a_backward, take_gradient
from zero.run import ZeroArgs, ZeroRun, recompute_blocks
from zero.unit import ShardedUnit


class Unit(ShardedUnit):
    """Parameters in one flat tensor: this rank keeps its `shard`, and has `full` while it is needed."""

    def start_gather(self) -> None:
        """Start to gather the parameters, unless that has been done."""
        if self.full is not None:
            return
        self._version = self.shard._version  # an optimizer step changes it, and makes `full` stale
        self.full = torch.empty(self.flat.numel, dtype=self.dtype, device=self.shard.device)
        mine = self.full[self.flat.mine]
        mine.copy_(self.shard)
        self._gathering = all_gather(self.full, mine, group=self.group, async_op=True, pattern=self.pattern)

    def gather(self) -> None:
        """Wait until all of `full` is there, and make the module's parameters views of it."""
        self.start_gather()
        if self._gathering is not None:
            self._wait_for_gather()
            self._show()

    def free(self) -> None:
        """Free the memory of the full parameters."""
        if self._gathering is not None:  # prefetched, but not used: no parameter is a view of it yet
            self._wait_for_gather()
        elif self.full is not None:
            self._hide()
        self.full = None

    def _wait_for_gather(self) -> None:
        """Wait for the gather that is in flight. After an error the unit is not full."""
        handle, self._gathering = self._gathering, None
        try:
            handle.wait()
        except BaseException:
            self.full = None
            raise

    def reduce_scatter(self) -> None:
        """Start the reduce-scatter of the full gradients: this rank gets the mean of its shard."""
        gradients = self.gradients.full
        shard = gradients.new_empty(self.flat.shard_numel)
        with span(self.name, "launch", lane="launches", bytes=gradients.nbytes):
            handle = reduce_scatter(
                shard, gradients, op="mean", group=self.group, async_op=True, pattern=self.pattern
            )
        self._reducing = shard, handle

    def wait_for_gradients(self) -> None:
        """Wait for the shard of the gradients, add it to earlier ones, and free the full gradients."""
        (shard, handle), self._reducing = self._reducing, None
        handle.wait()
        self.gradients.keep(shard)


class FullyShardedDataParallel(AnyLoop):
    """Wraps a module. Its `parameters()` are pieces: what this rank's shards have of each parameter.

    Give them to any optimizer that updates each number on its own, such as SGD or Adam. `blocks` are
    gathered and freed one by one; by default they are the members of each ModuleList, ModuleDict and
    Sequential. Every rank must run the same blocks in the same order. With `compute_dtype`, parameters and
    inputs are cast to it for computing and for sending, and outputs are cast back; shards and optimizer
    keep the dtype that the parameters had.

    With several microbatches, divide each loss by their number. Call `finish_gradient_sync()` after the last
    backward: then the `grad` of each piece is the mean over ranks. sharded_module.py says what is refused.
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
        self._seen: list[ShardedBlock] = []  # the blocks that this forward has run
        self._order: list[ShardedBlock] = []  # those of the forward before, which tell what to prefetch

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Gather the root, and run the module, whose hooks gather the blocks one by one."""
        self._seen = []
        with self._in_forward():
            self.root.start_gather()
            if self._order:
                self._order[0].start_gather()
            self.root.gather()
            # Instead of a full parameter autograd saves a note, which gathers the parameter in the backward.
            with Notes(self._full_units, self._begin_backward):
                inputs, options = map_tensors((inputs, options), self._as_computed)
                output = map_tensors(self.module(*inputs, **options), self._as_given)
        self._order = self._seen
        self._free_touched()
        self._await_backward(output)
        return output

    def _before_forward(self, block: ShardedBlock) -> None:
        """Wait for the block's parameters, and prefetch those of the next block."""
        if is_in_a_backward():  # which recomputes activations
            block.gather()
            return
        self._begin_turn(block)
        block.gather()
        self._seen.append(block)
        so_far = len(self._seen)
        if self._order[:so_far] == self._seen and so_far < len(self._order):
            self._order[so_far].start_gather()

    def _after_forward(self, block: ShardedBlock, output: Any) -> None:
        """Free the block, and register what the backward does when it comes back to the block."""
        if is_in_a_backward():
            return
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, turn=block.turn: self._before_backward(turn))
        if self._reshards or not torch.is_grad_enabled():
            block.free()
            if torch.is_grad_enabled() and self._seen == self._order:
                block.start_gather()  # the last block, for its backward (keeping it would save this gather)

    def _before_backward(self, turn: Turn) -> None:
        """Finish the blocks whose backward has ended, wait for this block's parameters, and prefetch."""
        self._begin_backward()
        if turn.has_begun or turn not in self._turns:
            return  # another output has begun it, or the graph has a second backward, where notes gather
        turn.has_begun, at = True, self._turns.index(turn)
        still_needed = {other.block for other in self._turns if not other.has_begun} | {turn.block}
        for later in self._turns[at + 1 :]:
            if later.block not in still_needed:
                later.block.finish(self._reductions)  # frees it, and sends zeros for gradients that it misses
        turn.block.gather()
        if at > 0:
            self._turns[at - 1].block.start_gather()

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Move a gradient out of the model, and reduce-scatter each unit that is complete with it."""
        self._begin_backward()
        gradient = take_gradient(parameter)
        if gradient is None:
            return  # autograd also calls the hook where a backward has returned None
        block, unit, position = self._place[parameter]
        self._used.add(parameter)
        if block.is_reduced:  # an earlier block's forward has used the parameter: any_loop.py sends it later
            self._late.append((unit, position, gradient))
            return
        unit.gradients.put(position, gradient)
        # Gradients of the root come between those of blocks, not always at one point: they are sent last.
        if block is not self.root and block.reduce_complete(self._reductions):
            block.free_trained()


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
            run.evaluate(step, model)
            run.stop_if_asked(step)
    held = memory.finish(as_json=args.json)
    with model.gathered() as full:
        run.finish(full, **held)


if __name__ == "__main__":
    start(main, Args)
