"""Say which elements of a model's and an optimizer's full tensors a rank holds, for a checkpoint of them.

      a weight of 4 x 6       tensor parallelism: a box        and ZeRO on 2 ranks: a range of the box
        0  1  2  3  4  5        3  4  5                          3  4  5         .  .  .
        6  7  8  9 10 11        9 10 11                          9 10 11         .  .  .
       12 13 14 15 16 17       15 16 17                          .  .  .        15 16 17
       18 19 20 21 22 23       21 22 23                          .  .  .        21 22 23
                              offset (0, 3)                    start 0         start 6

A model that divides something among ranks has a method `state_shards(optimizer)`. It returns the shards of
each parameter and its optimizer's state (`trained_shards`), and `buffer_shards`. Names are those of the plain
model on one process; a tied parameter is given once, by its first name. Ranks that hold the same elements all
say so.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lab.launch.errors import WorkbookError


class Place(NamedTuple):
    """Says which elements of a full tensor a shard has: those from `start` to `end` of a box, row by row."""

    name: str
    dtype: str
    shape: Sequence[int]  # of the full tensor
    offset: Sequence[int]  # of the box in it
    box: Sequence[int]
    start: int
    end: int

    def box_in(self, full: Tensor) -> Tensor:
        """Return a view of the box in the full tensor."""
        return full[tuple(slice(at, at + size) for at, size in zip(self.offset, self.box, strict=True))]

    def overlaps(self, other: "Place") -> bool:
        """Return whether both places may have elements in common: ranges of one box, or two boxes."""
        if list(self.offset) == list(other.offset) and list(self.box) == list(other.box):
            return self.start < other.end and other.start < self.end
        sides = zip(self.offset, self.box, other.offset, other.box, strict=True)
        return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides)


@dataclasses.dataclass(frozen=True, eq=False)
class StateShard:
    """Holds elements of the full tensor `name`, which has `shape`: a box, a range, or all.

    The box begins at `offset` of the full tensor, and has the sizes `box`. The shard is the box's elements in
    row-major order, from number `start` on. Left out: the box is `tensor`, if it has as many dimensions as
    the full tensor, and otherwise the full tensor. Rows after the end of the full tensor, and elements after
    the end of the box, are padding. With `optimizer` the shard is the state that the optimizer has for
    `tensor`. Shards of two ranks must be equal or apart; others are `is_copy`, loaded and not saved.

        StateShard("model/weight", weight)                                       all of it, as every rank
        StateShard("model/weight", columns, (4, 6), offset=(0, 3))               the box above
        StateShard("model/weight", flat, (4, 6), (0, 3), box=(4, 3), start=6)    ZeRO's range of the box
    """

    name: str
    tensor: Tensor
    shape: Sequence[int] | None = None
    offset: Sequence[int] | None = None
    box: Sequence[int] | None = None
    start: int = 0
    is_copy: bool = False
    optimizer: Optimizer | None = None

    @functools.cached_property
    def place(self) -> Place:
        """Return which elements these are."""
        shape = tuple(self.tensor.shape if self.shape is None else self.shape)
        offset = tuple(self.offset or [0] * len(shape))
        is_box = self.tensor.dim() == len(shape) and self.start == 0
        box = tuple(self.box or (self.tensor.shape if is_box else shape))
        if shape:
            box = (max(0, min(box[0], shape[0] - offset[0])), *box[1:])
        end = max(self.start, min(self.start + self.tensor.numel(), math.prod(box)))
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return Place(self.name, dtype, shape, offset, box, self.start, end)

    @property
    def numel(self) -> int:
        """Return the number of elements, without padding."""
        return self.place.end - self.place.start

    def elements(self) -> Tensor:
        """Return the elements in one dimension, without padding."""
        return self.tensor.detach().reshape(-1)[: self.numel]

    def take_from(self, full: Tensor) -> None:
        """Copy the shard's elements of the full tensor into the shard."""
        place = self.place
        write(self.tensor.detach(), 0, place.box_in(full).reshape(-1)[place.start : place.end])


def write(tensor: Tensor, start: int, elements: Tensor) -> None:
    """Replace elements of a tensor from number `start` on, in row-major order, whatever its strides are."""
    flat = tensor.reshape(-1)  # a copy where the strides forbid a view
    flat[start : start + len(elements)] = elements
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def trained_shards(
    name: str, trained: Tensor, optimizer: Optimizer | None, **where: Any
) -> Iterator[StateShard]:
    """Yield the shard of a parameter that `optimizer` updates as `trained`, and that of its state.

    `where` are the fields of StateShard that say which elements `trained` has.
    """
    yield StateShard(f"model/{name}", _local(trained), **where)
    if optimizer is not None and trained.requires_grad:
        yield StateShard(f"optimizer/{name}", trained, **where, optimizer=optimizer)


def buffer_shards(module: nn.Module) -> Iterator[StateShard]:
    """Yield the shards of the buffers that the module's state dict has."""
    saved = module.state_dict().keys()
    yield from (
        StateShard(f"buffer/{name}", buffer) for name, buffer in module.named_buffers() if name in saved
    )


def plain_shards(model: nn.Module, optimizer: Optimizer) -> list[StateShard]:
    """Return the shards of a model that each rank has in full, or whose parameters are DTensors."""
    model = getattr(model, "_orig_mod", model)  # torch.compile(model) gives parameters other names
    updated = {p for group in optimizer.param_groups if group.get("lr", 1) for p in group["params"]}
    is_outer = any(isinstance(value, Optimizer) for value in vars(optimizer).values())
    if is_outer or not updated.issubset(model.parameters()):
        raise WorkbookError(
            f"{type(optimizer).__name__} updates other tensors than the model's parameters, or lets another "
            "optimizer do it: a checkpoint would not have its state."
        )
    shards = [*buffer_shards(model)]
    for name, parameter in model.named_parameters():
        where = {}
        if isinstance(parameter, DTensor):
            where = {"shape": parameter.shape, "offset": parameter.__create_chunk_list__()[0].offsets}
        shards += trained_shards(name, parameter, optimizer, **where)
    return shards


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# An optimizer has tensors and numbers for each parameter, and numbers for each group of parameters.


def tensors_and_numbers(shards: Iterable[StateShard]) -> tuple[list[StateShard], dict[str, Any]]:
    """Return the shards of tensors to save, with those of the optimizer's state, and the state's numbers."""
    tensors: list[StateShard] = []
    numbers: dict[str, Any] = {}
    for shard in (shard for shard in shards if not shard.is_copy):
        if (optimizer := shard.optimizer) is None:
            tensors.append(shard)
            continue
        options = [group.items() for group in optimizer.param_groups]
        numbers["groups"] = [{key: value for key, value in one if _is_number(value)} for one in options]
        is_whole = _local(shard.tensor).numel() == math.prod(shard.shape or shard.tensor.shape)
        for kind, value in optimizer.state.get(shard.tensor, {}).items():
            if _is_number(value) or isinstance(value, bool):
                numbers[_state_name(shard, kind)] = value
            elif isinstance(value, Tensor) and (is_whole or value.shape in ((), shard.tensor.shape)):
                tensors.append(_state_shard(shard, kind, value))
            else:
                raise WorkbookError(
                    f"a checkpoint cannot have the state {kind!r} of {type(optimizer).__name__}, which is no "
                    f"number, and no tensor of the shape that the rank has of {shard.name.partition('/')[2]}"
                )
    return tensors, numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):  # such as betas
        return all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _state_name(shard: StateShard, kind: str) -> str:
    return shard.name.replace("/", f"/{kind}/", 1)


def _state_shard(shard: StateShard, kind: str, value: Tensor) -> StateShard:
    """Return the shard of a tensor in a parameter's state: a moment, or the same for all elements."""
    name = _state_name(shard, kind)
    if value.dim() and value.shape == shard.tensor.shape:
        return dataclasses.replace(shard, name=name, tensor=_local(value), optimizer=None)
    return StateShard(name, value)


def tensors_to_load(
    shards: Iterable[StateShard], saved: dict[str, list[Place]], numbers: dict[str, Any]
) -> Iterator[StateShard]:
    """Yield the shards of tensors to fill. The optimizer gets new state, of the kinds that were saved."""
    kinds = sorted({name.split("/")[1] for name in (*saved, *numbers) if name.startswith("optimizer/")})
    for shard in shards:
        if (optimizer := shard.optimizer) is None:
            yield shard
            continue
        if "groups" not in numbers:  # the model was saved without its optimizer
            continue
        for group, options in zip(optimizer.param_groups, numbers["groups"], strict=False):
            group |= {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
        state = optimizer.state[shard.tensor] = {}
        for kind in kinds:
            if (name := _state_name(shard, kind)) in numbers:
                state[kind] = numbers[name]
            elif name in saved:
                state[kind] = _zeros_like(saved[name][0], kind, shard)
                yield _state_shard(shard, kind, state[kind])


def _zeros_like(saved: Place, kind: str, shard: StateShard) -> Tensor:
    dtype, options = getattr(torch, saved.dtype), shard.optimizer.defaults  # type: ignore[union-attr]
    if list(saved.shape) == list(shard.shape or shard.tensor.shape) != []:
        return torch.zeros_like(shard.tensor, dtype=dtype)
    # As with torch's load_state_dict, only some kernels want the number of steps on a GPU.
    on_host = kind == "step" and not (options.get("fused") or options.get("capturable"))
    return torch.zeros(saved.shape, dtype=dtype, device="cpu" if on_host else shard.tensor.device)
