"""Say which elements of the full tensors a rank holds, so that a checkpoint fits any other division of them.

      a weight of 4 x 6       tensor parallelism: a box        and ZeRO on 2 ranks: a range of the box
        0  1  2  3  4  5        3  4  5                          3  4  5         .  .  .
        6  7  8  9 10 11        9 10 11                          9 10 11         .  .  .
       12 13 14 15 16 17       15 16 17                          .  .  .        15 16 17
       18 19 20 21 22 23       21 22 23                          .  .  .        21 22 23
                              offset (0, 3)                    start 0         start 6

A model that divides something among ranks has one method for its checkpoints:

    def shards(self, optimizer) -> list[Shard]:
        "Return what this rank holds of each full tensor of the model, and of the optimizer's state."
        return [
            shard
            for name, parameter in self.module.named_parameters()
            for shard in shards_of(name, parameter, optimizer, self.full_shapes[name], self.offsets[name])
        ]

Names are those of the plain model on one process; a tied parameter is given once, by its first name. Ranks
that hold the same elements all say so: each of them then saves a part. The optimizer's state is looked up by
the tensor that the optimizer updates, and has the same places as this tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

Ints = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Shard:
    """Holds elements of the full tensor `name`, which has `shape`: an n-th of it, a range, or all.

    The box begins at `offset` of the full tensor, and has the sizes `box`. The shard is the box's elements in
    row-major order, from number `start` on. Left out: all of the full tensor is the box, but if `tensor` has
    as many dimensions as the full tensor, it is itself the box.

    Padding is not saved: rows of the box after the end of the full tensor, and elements after the end of the
    box.

        Shard("model/weight", weight)                                       all of it, as every rank
        Shard("model/weight", columns, (4, 6), offset=(0, 3))               the box above
        Shard("model/weight", flat, (4, 6), start=12)                       ZeRO's range of the full tensor
        Shard("model/weight", flat, (4, 6), (0, 3), box=(4, 3), start=6)    ZeRO's range of the box
    """

    name: str
    tensor: Tensor
    shape: Ints | None = None
    offset: Ints | None = None
    box: Ints | None = None
    start: int = 0


def shards_of(
    name: str,
    trained: Tensor,
    optimizer: Optimizer,
    shape: Ints | None = None,
    offset: Ints | None = None,
    box: Ints | None = None,
    start: int = 0,
) -> Iterator[Shard]:
    """Yield the shard of a parameter that `optimizer` updates as `trained`, and those of its state."""
    yield Shard(f"model/{name}", trained, shape, offset, box, start)
    for kind, value in optimizer.state.get(trained, {}).items():
        if value.dim():
            yield Shard(f"optimizer/{kind}/{name}", value, shape, offset, box, start)
        else:  # such as AdamW's number of steps, which is equal for all elements
            yield Shard(f"optimizer/{kind}/{name}", value)
