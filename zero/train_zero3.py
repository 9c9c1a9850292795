"""ZeRO, stage 3 (fully sharded): a rank keeps an n-th of everything, and gathers the rest when it is needed.

      forward    compute                | first  | block 0 | block 1 | block 2 | last   |
                 all-gather      root   | 0      | 1       | 2       |         |        |

      backward   compute                | last   | block 2 | block 1 | block 0 | first  |
                 all-gather             |        | 1       | 0       |         |        |
                 reduce-scatter         |        |         | 2       | 1       |        | 0, root

Stages 1 and 2 leave all parameters on every rank. But the parameters of a block (a transformer layer, for
example) are needed only while the block computes, twice in a step. In between they are freed. While one
block computes, the next one is gathered (prefetched): in the forward the one registered after it, in the
backward the one before it.

The root has the parameters that belong to no block, or to several: embeddings (first in the picture), the
last norm and the head (last). It stays full from the start of the forward to the end of the backward, because
both need it at both ends. The last block stays full in between, too: the backward starts there.

      memory of a rank    (P + G + O)/n, and for a time full parameters of root and two blocks, and gradients
                          of root and three
      bytes sent          (n-1)/n (3 P - root - last block) for each backward: two gathers, one reduce-scatter
      P, G, O: bytes of all parameters, gradients and optimizer state; what is sent has `compute_dtype`

`reshard_after_forward=False` keeps the blocks full between forward and backward. That takes up to P more
memory, and saves their second gather. There is no memory for full gradients, so each microbatch sends its
own, and they add up in the shards.

A block's parameters are one flat tensor, a `Unit`, that is gathered, freed and reduce-scattered as a whole.
`full` keeps one storage, which is resized to 0 bytes and back. Tensors that autograd has saved point into
this storage, so they are right again after the next gather. The hooks of `FullyShardedDataParallel` decide
when. A block's gradients are sent when the backward reaches the block before it; those of the first one and
of the root when it has ended. These moments are the same on all ranks, also where a rank does not use all
parameters. Parts: shards.py, the layout; memory.py, the report.

After Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, and Zhao et al., "PyTorch FSDP: Experiences
on Scaling Fully Sharded Data Parallel", VLDB 2023, https://arxiv.org/abs/2304.11277.
"""

import contextlib
import dataclasses
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from comm.collectives import Group, Work, all_gather, broadcast, reduce_scatter
from comm.cost import expected_traffic
from comm.script import start
from data_parallel.train_naive_grad_accumulation import accumulate
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.blocks import blocks_of, recompute_blocks
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.memory import MemoryReport
from training.arguments import ZeroArgs
from training.clipping import clip_grad_norm_
from training.gradients import is_in_backward
from training.guard import guarded
from training.run import Run
from training.state_shards import StateShard, buffer_shards
from zero.memory import owned, shares_of
from zero.shards import FlatLayout, ParameterShard

MOST_IN_FLIGHT = 2  # without a limit, the full gradients of all blocks would wait in memory for a slow link


def count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count a step as a change of what it has updated: fused optimizers do not."""
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


register_optimizer_step_post_hook(count_step)


class Unit:
    """Has some parameters in one flat tensor `full` while they are needed; this rank keeps its `shard`.

    freed ── start_gather ──► on their way ── gather ──► full: the module's parameters are views of `full`
      ▲                                                    │
      └────────────────────── free ────────────────────────┘
    """

    def __init__(self, parameters: list[nn.Parameter], group: Group, dtype: torch.dtype) -> None:
        self.group = group
        self.layout = FlatLayout(parameters, dist.get_rank(group), dist.get_world_size(group))
        values = parameters[0].new_zeros(self.layout.numel)
        for parameter, view in zip(parameters, self.layout.views(values), strict=True):
            view.copy_(parameter.detach())
        broadcast(values, root=0, group=group)
        self.shard = values[self.layout.mine].clone()
        self.shards = self.layout.parameter_shards(self.shard)
        self.full = torch.empty(self.layout.numel, dtype=dtype, device=self.shard.device)
        self._gathering: Work | None = None
        self.number = -1  # among the model's units; ranks must gather the same one
        self._gathered_version = 0  # of the shard when it was gathered; an optimizer step changes it
        self.free()

    @property
    def is_freed(self) -> bool:
        return self.full.untyped_storage().size() == 0

    @property
    def is_full(self) -> bool:
        return not self.is_freed and self._gathering is None

    @property
    def is_stale(self) -> bool:
        """Return whether the shard has changed since the last gather."""
        return self._gathered_version != self.shard._version  # where torch counts changes; see `count_step`

    def start_gather(self) -> None:
        """Start to gather the parameters, unless that has been done."""
        if self.is_stale and not self.is_freed:  # after a forward without a backward
            self.free()
        if self.is_freed:
            self._gathered_version = self.shard._version
            self.full.untyped_storage().resize_(self.full.nbytes)
            mine = self.full[self.layout.mine].copy_(self.shard)
            self._gathering = all_gather(self.full, mine, self.group, async_op=True, tensor_id=self.number)

    def gather(self) -> None:
        """Wait until all of `full` is there, and make the module's parameters views of it."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            for parameter, view in zip(self.layout.parameters, self.layout.views(self.full), strict=True):
                parameter.data = view

    def free(self) -> None:
        """Free the memory of the full parameters. Code that reads one sees NaN."""
        if self._gathering is not None:  # prefetched, but not used
            self._gathering.wait()
            self._gathering = None
        nan = torch.full((), torch.nan, dtype=self.full.dtype, device=self.full.device)
        for parameter in self.layout.parameters:
            parameter.data = nan.expand(parameter.shape)
        self.full.untyped_storage().resize_(0)

    def reduce_scatter(self) -> None:
        """Take the gradients out of the model, and start to average them; unused parameters have zeros."""
        gradients = self.full.new_zeros(self.full.shape)
        for parameter, view in zip(self.layout.parameters, self.layout.views(gradients), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        mine = gradients[self.layout.mine]
        work = reduce_scatter(mine, gradients, "mean", self.group, async_op=True)
        self._reducing = mine, work

    def wait_for_gradients(self) -> Tensor:
        """Wait for this rank's part of the mean gradients, and return it."""
        mine, work = self._reducing
        del self._reducing
        work.wait()
        return mine.clone()  # a view would keep all of the full gradients in memory

    def add_gradients(self, mine: Tensor) -> None:
        """Add this rank's part of the mean gradients to that of earlier microbatches."""
        self.layout.add_gradient(self.shards, mine.to(self.shard.dtype))


class ShardedModule(nn.Module):
    """Has what a module of shards in `units` needs beside the idea: names, clipping, the full state."""

    module: nn.Module
    group: Group
    compute_dtype: torch.dtype | None
    units: list[Unit]
    parameter_shards: list[ParameterShard]  # of all units

    def compute(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run the module in `compute_dtype`, if there is one, and return outputs in the shards' dtype."""
        if self.compute_dtype is None:
            return self.module(*inputs, **options)
        inputs, options = tree_map_only(Tensor, partial(cast, dtype=self.compute_dtype), (inputs, options))
        outputs = self.module(*inputs, **options)
        return tree_map_only(Tensor, partial(cast, dtype=self.units[0].shard.dtype), outputs)

    def _complete(self, unit: Unit) -> None:
        """Wait for the mean gradients of a unit, and give them to its shards."""
        unit.add_gradients(unit.wait_for_gradients())

    def names(self) -> dict[Tensor, list[str]]:
        """Return the names of each full parameter in the wrapped module; a tied one has several."""
        names: dict[Tensor, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        return names

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shard of each parameter, by the parameter's name in the wrapped module."""
        names = self.names()
        yield from ((names[shard.parameter][0], shard.tensor) for shard in self.parameter_shards)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; return their norm."""
        return clip_grad_norm_(self.parameters(), max_norm, [self.group])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the plain module, on every rank. All ranks must call it."""
        names = self.names()
        state = {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}
        for unit in self.units:
            full = unit.shard.new_empty(unit.full.shape)
            all_gather(full, unit.shard, self.group)
            for parameter, view in zip(unit.layout.parameters, unit.layout.views(full), strict=True):
                state |= {name: view.clone() for name in names[parameter]}
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's shards of a plain module's state dict."""
        names = self.names()
        for unit in self.units:
            full = unit.shard.new_zeros(unit.full.shape)
            for parameter, view in zip(unit.layout.parameters, unit.layout.views(full), strict=True):
                view.copy_(state[names[parameter][0]])
            unit.shard.copy_(full[unit.layout.mine])
        for name, buffer in self.module.named_buffers():
            buffer.copy_(state.get(name, buffer))

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Give the module its full parameters, in the dtype in which it computes, for the `with` block."""
        for unit in self.units:
            unit.gather()
        try:
            yield self.module
        finally:
            for unit in self.units:
                unit.free()

    def state_shards(self, optimizer: torch.optim.Optimizer) -> list[StateShard]:
        """Return, for a checkpoint, this rank's shards of the parameters and of the optimizer's state."""
        names, found = self.names(), [*buffer_shards(self.module)]
        for shard in self.parameter_shards:
            found += shard.checkpointed(names[shard.parameter][0], optimizer)
        return found


@guarded
class FullyShardedDataParallel(ShardedModule):
    """Wraps a module. Its `parameters()` are this rank's shards, one of each parameter.

    Give them to any optimizer that updates each number on its own, such as SGD or Adam. `blocks` are
    gathered and freed one by one; by default they are the members of each ModuleList and Sequential. All
    ranks must run the same blocks. With `compute_dtype`, parameters and inputs are cast to it for computing
    and for sending, and outputs are cast back; shards and optimizer keep the dtype of the parameters.

    Call `finish_gradient_sync()` after the last backward: then the `grad` of each shard is the mean over
    ranks, with zeros for an unused parameter. With several microbatches, use `accumulate`
    (train_naive_grad_accumulation.py), or do as it does: a forward ends the sending of the backward before.
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
        self.units = [unit for block in self.blocks for unit in block]
        for number, unit in enumerate(self.units):
            unit.number = number
        self.parameter_shards = [shard for unit in self.units for shard in unit.shards]
        self._current: list[Unit] = []  # the block that the backward has reached
        self._in_flight = deque[Unit]()
        self._expects_backward = self._has_backward = False  # before the next finish_gradient_sync()
        for i, part in enumerate([module, *modules]):
            part.register_forward_pre_hook(partial(self._before_forward, i))
            part.register_forward_hook(partial(self._after_forward, i))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module, whose hooks gather the root and the blocks."""
        if torch.is_grad_enabled():
            self.end_backward()  # of the microbatch before
        self._expects_backward |= torch.is_grad_enabled()
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
        passed_on, tensors = tree_leaves(inputs), tree_leaves(output)
        for tensor in (leaf for leaf in tensors if isinstance(leaf, Tensor)):
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
        if not self._expects_backward:
            raise WorkbookError("A backward came after finish_gradient_sync(), without a forward before it.")
        if any(unit.is_stale for unit in self.blocks[i]):
            raise WorkbookError("The optimizer has stepped between a forward and its backward.")
        self._has_backward = True
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
                    self._complete(self._in_flight.popleft())
                unit.reduce_scatter()
                self._in_flight.append(unit)

    def finish_gradient_sync(self) -> None:
        """Complete the mean over ranks, which is then the `grad` of each shard."""
        self.end_backward()

    def end_backward(self) -> None:
        """Free all parameters, and average the gradients that are left of a backward, if there was one."""
        if not self._has_backward:
            return
        for unit in self.units:
            unit.free()
        self._reduce(self._current)
        self._reduce(self.blocks[0])
        self._current = []
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        self._expects_backward = self._has_backward = False

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


def divide(module: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of the root, and then those of each block.

    The root has those that are used outside of all blocks, or in several blocks.
    """
    in_blocks = {part for block in blocks for part in block.modules()}
    outside = {
        p for part in module.modules() if part not in in_blocks for p in part.parameters(recurse=False)
    }
    uses = Counter(parameter for block in blocks for parameter in block.parameters())
    root = {p for p in module.parameters() if p in outside or uses[p] > 1}
    own = [[p for p in block.parameters() if p not in root] for block in blocks]
    return [[p for p in module.parameters() if p in root], *own]


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of floating point numbers in another dtype, and others as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


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
