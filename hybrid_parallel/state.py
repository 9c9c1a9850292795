"""Say which elements of the full model and of its optimizer's state a rank of a mesh has.

      axis        what a rank has of the model      its shards (training/checkpoint.py)
      pipeline    the parameters of its stages      those; a tied parameter also on its last stage, as a copy
      tensor      an n-th along one dimension       boxes; rows that pad a vocabulary are not saved
                  some parameters in full           all of them, on each rank of the axis
      data and    with ZeRO, a range of elements    ranges of a box
      context     without ZeRO, all elements        boxes, equal on all replicas
      expert      some experts of each block        those

AdamW's two moments have the same elements as the parameters.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from hybrid_parallel.clipping import counted_elsewhere
from lab.models.model import GPT
from training.checkpoint import Shard, shards_of


class Held(NamedTuple):
    """Holds what this rank trains of one parameter: a flat range of its local tensor, from `start` on."""

    name: str
    parameter: nn.Parameter
    tensor: Tensor
    start: int


def held(hybrid: Any) -> Iterator[Held]:
    """Yield what this rank's optimizer trains, each parameter once."""
    is_tied = isinstance(hybrid.plain, GPT) and hybrid.plain.config.tied
    first = {"head.weight": "token_embedding.weight"} if is_tied else {}
    names = {p: first.get(name, name) for name, p in hybrid.named_own_parameters().items()}
    if hybrid.sizes.zero:
        for piece in hybrid.pieces:
            yield Held(names[piece.parameter], piece.parameter, piece.tensor, piece.start)
    else:
        for parameter, name in names.items():
            yield Held(name, parameter, parameter, 0)


def mesh_shards(hybrid: Any, optimizer: Optimizer) -> list[Shard]:
    """Return this rank's shards of the full model and of the optimizer's state."""
    copies = counted_elsewhere(hybrid.pipeline, hybrid.tensor)
    shards: list[Shard] = []
    for one in held(hybrid):
        local = list(one.parameter.shape)
        shape, offset = list(local), [0] * len(local)
        if hybrid.tensor is not None and one.name in hybrid.tensor.dims:
            dim, shape[dim] = hybrid.tensor.dims[one.name]
            offset[dim] = hybrid.mesh.coordinate("tensor") * local[dim]
        where = shape, offset, local, one.start, one.parameter in copies
        shards += shards_of(one.name, one.tensor, optimizer, *where)
    return shards


def load_full(hybrid: Any, state: dict[str, Tensor]) -> None:
    """Fill this rank's shards and buffers of the model from a full state."""
    for shard in mesh_shards(hybrid, hybrid.optimizer):
        kind, _, name = shard.name.partition("/")
        for box in shard.boxes(shard.tensor.detach().view(-1)) if kind == "model" else ():
            ends = zip(box.chunk.offsets, box.chunk.sizes, strict=True)
            box.view.copy_(state[name][tuple(slice(first, first + size) for first, size in ends)])
    for name, buffer in hybrid.plain.named_buffers():
        if name in state:
            buffer.copy_(state[name])
    if hybrid.sizes.zero in (1, 2):
        hybrid.data.gather_parameters()
