"""Lay parameters out in one flat tensor, and divide it into equal shards: all stages of ZeRO do this.

      full           |     weight 0      | bias 0 |      weight 1     |.|
      shards         |     rank 0     |     rank 1     |     rank 2     |    equal, with padding at the end
      in each one    |   weight 0     |w0| bias 0 |w 1 |   weight 1   |.|    the rank's shard of a parameter

A shard may begin and end in the middle of a parameter, so any parameters fit on any number of ranks. An
optimizer that updates each number on its own does the same to a rank's shards of parameters as to full ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

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

    def checkpointed(self, name: str, optimizer: Optimizer) -> Iterator[StateShard]:
        """Yield, for a checkpoint, the shards of the parameter and of the optimizer's state."""
        full = self.parameter.shape
        return trained_shards(name, self.tensor, optimizer, shape=full, box=full, start=self.start)


class FlatLayout:
    """Says where each of some parameters lies in a flat tensor, and which part of it this rank owns.

    The parameters have one dtype, and all or none of them are trained. The flat tensor has `numel` numbers,
    with `padding` at its end: less than one for each rank. The slice `mine` of it is this rank's shard.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, ranks: int) -> None:
        self.parameters = parameters
        self.is_trained = parameters[0].requires_grad
        self.sizes = [parameter.numel() for parameter in parameters]
        shard_numel = -(-sum(self.sizes) // ranks)  # rounded up
        self.numel = ranks * shard_numel
        self.padding = self.numel - sum(self.sizes)
        self.mine = slice(rank * shard_numel, (rank + 1) * shard_numel)

    def views(self, full: Tensor) -> list[Tensor]:
        """Return the place of each parameter in a flat tensor, in the parameter's shape."""
        *places, _ = full.split([*self.sizes, self.padding])
        return [place.view(p.shape) for place, p in zip(places, self.parameters, strict=True)]

    def split(self, shard: Tensor) -> list[tuple[int, Tensor]]:
        """Return for each parameter at which element this rank's shard of it starts, and a view of it.

        `shard` is this rank's part of a flat tensor. The view is empty, and starts at 0, if the parameter is
        not in this rank's part.
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
            found.append(ParameterShard(parameter, start, nn.Parameter(part, self.is_trained)))
        return found

    def add_gradient(self, shards: list[ParameterShard], gradient: Tensor) -> None:
        """Give each shard its part of `gradient`, this rank's part of a flat mean gradient, or add it."""
        for one, (_, part) in zip(shards, self.split(gradient), strict=True):
            part = part.view_as(one.tensor)
            total = part if one.tensor.grad is None else one.tensor.grad + part
            one.tensor.grad = total


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
