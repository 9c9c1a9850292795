"""Lay parameters out in one flat tensor, and divide it into equal shards: all stages of ZeRO do this.

      full           |     weight 0      | bias 0 |      weight 1     |.|
      shards         |     rank 0     |     rank 1     |     rank 2     |    equal, with padding at the end
      in each one    |   weight 0     |w0| bias 0 |w 1 |   weight 1   |.|    the rank's shard of a parameter

A shard may begin and end in the middle of a parameter, so any parameters fit on any number of ranks. An
optimizer that updates each number on its own does the same to a rank's shards of parameters as to full ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from comm.collectives import Group, broadcast
from lab.launch.errors import WorkbookError
from training.state_shards import StateShard, buffer_shards, trained_shards


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """Holds the elements of one parameter that this rank owns; there may be none.

    `tensor` has as many dimensions as the parameter, all of size 1 but the last, and `start` is the number of
    its first element in the parameter. An optimizer trains `tensor`, whose `grad` is this rank's shard of the
    mean gradient.
    """

    parameter: nn.Parameter  # the full one, of the model
    start: int
    tensor: nn.Parameter

    def checkpointed(self, name: str, optimizer: Optimizer | None) -> Iterator[StateShard]:
        """Yield, for a checkpoint, the shards of the parameter and of the optimizer's state."""
        full = self.parameter.shape
        return trained_shards(name, self.tensor, optimizer, shape=full, box=full, start=self.start)


class FlatLayout:
    """Says where each of some parameters lies in a flat tensor, and which part of it this rank owns.

    The parameters have one dtype. The flat tensor has `numel` numbers, with `padding` at its end: less than
    one for each rank. The slice `mine` of it is this rank's shard.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, ranks: int) -> None:
        if len({parameter.dtype for parameter in parameters}) > 1:
            raise WorkbookError("A flat tensor has one dtype, and these parameters have several.")
        self.parameters = parameters
        self.is_trained = any(parameter.requires_grad for parameter in parameters)
        self.sizes = [parameter.numel() for parameter in parameters]
        shard_numel = -(-sum(self.sizes) // ranks)  # rounded up
        self.numel = ranks * shard_numel
        self.padding = self.numel - sum(self.sizes)
        self.mine = slice(rank * shard_numel, (rank + 1) * shard_numel)

    def views(self, full: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each parameter and its place in a flat tensor, a view in the parameter's shape."""
        *places, _ = full.split([*self.sizes, self.padding])
        return [(p, place.view(p.shape)) for p, place in zip(self.parameters, places, strict=True)]

    def split(self, shard: Tensor) -> list[tuple[int, Tensor]]:
        """Return this rank's part of each parameter: the number of its first element, and a view of `shard`.

        `shard` is this rank's part of a flat tensor. Elements are numbered within their parameter.
        For a parameter outside of this part, the number is 0 and the view is empty.
        """
        parts, offset = [], 0
        for size in self.sizes:
            begin, end = max(self.mine.start, offset), min(self.mine.stop, offset + size)
            if begin < end:
                parts.append((begin - offset, shard[begin - self.mine.start : end - self.mine.start]))
            else:
                parts.append((0, shard[:0]))
            offset += size
        return parts

    def parameter_shards(self, shard: Tensor) -> list[ParameterShard]:
        """Return this rank's shard of each parameter; they share the memory of `shard`."""
        found = []
        for parameter, (start, part) in zip(self.parameters, self.split(shard), strict=True):
            part = part.view([1] * (parameter.dim() - 1) + [-1])  # weight decay is chosen by p.dim()
            found.append(ParameterShard(parameter, start, nn.Parameter(part, parameter.requires_grad)))
        return found

    def add_gradient(self, shards: list[ParameterShard], gradient: Tensor) -> None:
        """Give each shard its part of `gradient`, this rank's part of a flat mean gradient, or add it."""
        for one, (_, part) in zip(shards, self.split(gradient), strict=True):
            if one.tensor.requires_grad:
                part = part.view_as(one.tensor).to(one.tensor.dtype)
                one.tensor.grad = part if one.tensor.grad is None else one.tensor.grad + part

    def take_gradient(self, shards: list[ParameterShard], dtype: torch.dtype) -> Tensor:
        """Move the shards' gradients into this rank's part of a flat gradient, and return it."""
        flat = shards[0].tensor.new_zeros(self.mine.stop - self.mine.start, dtype=dtype)
        for one, (_, part) in zip(shards, self.split(flat), strict=True):
            if one.tensor.grad is not None:
                part.copy_(one.tensor.grad.flatten())
                one.tensor.grad = None
        return flat


class FlatParameters:
    """Has some parameters in a flat tensor `full`, which may be freed, and this rank's `flat_shard` of it.

    All ranks of `group` begin with rank 0's parameters. `dtype` is that of `full`: None for the parameters'.
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: Group, dtype: torch.dtype | None = None
    ) -> None:
        self.group = group
        self.layout = FlatLayout(parameters, dist.get_rank(group), dist.get_world_size(group))
        values = parameters[0].new_zeros(self.layout.numel)
        for parameter, view in self.layout.views(values):
            view.copy_(parameter.detach())
        broadcast(values, root=0, group=group)
        self.flat_shard = values[self.layout.mine].clone()
        self.shards = self.layout.parameter_shards(self.flat_shard)
        self.full = torch.empty_like(values, dtype=dtype)
        self.free()

    @property
    def is_freed(self) -> bool:
        return self.full.untyped_storage().size() == 0

    def point_parameters_into(self, full: Tensor) -> None:
        """Make each parameter of the module a view of its place in the flat tensor `full`."""
        for parameter, view in self.layout.views(full):
            parameter.data = view

    def free(self) -> None:
        """Free the memory of `full`, but not the tensor. Code that reads a parameter sees NaN."""
        nan = self.full.new_full((), torch.nan)
        for parameter in self.layout.parameters:
            parameter.data = nan.expand(parameter.shape)
        self.full.untyped_storage().resize_(0)

    def take_gradients(self) -> Tensor:
        """Move the module's gradients into a flat tensor, and return it; unused parameters have zeros."""
        gradients = self.full.new_zeros(self.full.shape)
        for parameter, view in self.layout.views(gradients):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        return gradients


def checkpointed(
    model: nn.Module, shards: Sequence[ParameterShard], optimizer: Optimizer
) -> list[StateShard]:
    """Return, for a checkpoint, the model as every rank has it, and this rank's shards of the state."""
    model = getattr(model, "_orig_mod", model)  # torch.compile(model) gives parameters other names
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [StateShard(f"model/{name}", parameter.detach()) for parameter, name in names.items()]
    found += buffer_shards(model)
    for shard in shards:
        _, *state = shard.checkpointed(names[shard.parameter], optimizer)
        found += state
    return found
