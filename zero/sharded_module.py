"""Name, clip, save and load the parameters of a module of which a rank has only shards.

This is what train_zero3_textbook.py and train_zero3.py have in common beside the idea of ZeRO 3: which
parameters belong to which block, names, clipping, the full state and checkpoints.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from comm.collectives import Group, all_gather
from lab.launch.errors import WorkbookError
from training.clipping import clip_grad_norm_
from training.state_shards import StateShard, buffer_shards
from zero.shards import FlatParameters, ParameterShard


class ShardedModule(nn.Module):
    """Has a module whose parameters are in `units`, which its subclass gathers and frees."""

    module: nn.Module
    group: Group
    compute_dtype: torch.dtype | None = None
    units: Sequence[FlatParameters]
    parameter_shards: list[ParameterShard]  # of all units

    def compute(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run the module in `compute_dtype`, if there is one, and return outputs in the shards' dtype."""

        def cast(values: Any, dtype: torch.dtype) -> Any:
            return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)

        if self.compute_dtype is None:
            return self.module(*inputs, **options)
        inputs, options = cast((inputs, options), self.compute_dtype)
        return cast(self.module(*inputs, **options), self.units[0].flat_shard.dtype)

    def names(self) -> dict[nn.Parameter, str]:
        """Return the name of each full parameter in the wrapped module; a tied one has its first name."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shard of each parameter, by the parameter's name in the wrapped module."""
        names = self.names()
        yield from ((names[shard.parameter], shard.tensor) for shard in self.parameter_shards)

    def finish_gradient_sync(self) -> None:
        """Do nothing: the end of each backward has completed the gradients, which `zero_grad()` may drop."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; return their norm."""
        return clip_grad_norm_(self.parameters(), max_norm, [self.group], norm_type)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Let the module have its full parameters, in the shards' dtype, in the `with` block."""
        for unit in self.units:
            full = unit.flat_shard.new_empty(unit.full.shape)
            all_gather(full, unit.flat_shard, self.group)
            unit.point_parameters_into(full)
        try:
            yield self.module
        finally:
            for unit in self.units:
                unit.free()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the plain module, on every rank. All ranks must call it."""
        with self.gathered() as full:
            return {name: tensor.detach().clone() for name, tensor in full.state_dict().items()}

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's shards of a plain module's state dict."""
        for shard in self.state_shards(None):
            shard.take_from(state[shard.name.partition("/")[2]])

    def state_shards(self, optimizer: torch.optim.Optimizer | None) -> list[StateShard]:
        """Return, for a checkpoint, this rank's shards of the parameters and of the optimizer's state."""
        names, found = self.names(), [*buffer_shards(self.module)]
        for shard in self.parameter_shards:
            found += shard.checkpointed(names[shard.parameter], optimizer)
        return found


def divide(module: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of the root, and then those of each block.

    The root has those that are used outside of all blocks, or in several blocks.
    """
    in_blocks = {part for block in blocks for part in block.modules()}
    others = [part for part in module.modules() if part not in in_blocks]
    outside = {parameter for part in others for parameter in part.parameters(recurse=False)}
    uses = Counter(parameter for block in blocks for parameter in block.parameters())
    root = {p for p in module.parameters() if p in outside or uses[p] > 1}
    own = [[p for p in block.parameters() if p not in root] for block in blocks]
    return [[p for p in module.parameters() if p in root], *own]


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in a block's inputs or output: in lists, tuples, dicts and a dataclass."""
    leaves = tree_leaves(vars(values) if dataclasses.is_dataclass(values) else values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def refuse_hidden(output: Any, tensors: list[Tensor]) -> None:
    """Raise WorkbookError if a block has returned something in which no tensor is found."""
    if not tensors:
        raise WorkbookError(
            f"A block returned {type(output).__name__}, in which stage 3 finds no tensor: let it return "
            "tensors, also in lists, tuples, dicts or a dataclass."
        )


def refuse_unless_tensor(output: Any) -> None:
    """Raise WorkbookError if a block or the module has returned something else than one tensor."""
    if not isinstance(output, Tensor):
        raise WorkbookError(
            f"A block returned {type(output).__name__}, and this first look takes one tensor only: take "
            "FullyShardedDataParallel (train_zero3.py)."
        )
