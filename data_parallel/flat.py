"""Lay parameters out in one flat tensor, of which each rank owns a shard: all stages of ZeRO divide such.

      parameters   |     weight 0      | bias 0 |      weight 1     |.|
      shards       |     rank 0     |     rank 1     |     rank 2     |    equal; at the end a little padding
      pieces       |   weight 0     |w 0| bias 0 |w1 |   weight 1   | |    what of each a rank owns

Shards are cut without regard to where a parameter ends, so any parameters fit on any number of ranks. A
rank's *piece* of a parameter is a flat tensor, empty where it owns nothing of it. An elementwise
optimizer cannot tell whether it is given parameters or pieces.
"""

from dataclasses import dataclass

from torch import Tensor, nn


def fill(parameters: list[nn.Parameter], first_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """Return which parameters, by position, share a bucket: neighbours of one dtype, up to a number of bytes.

    The first bucket has a cap of its own. A bucket is over its cap by part of its last parameter, at most.
    """
    buckets: list[list[int]] = []
    space = 0
    for i, parameter in enumerate(parameters):
        if not buckets or space <= 0 or parameter.dtype != parameters[i - 1].dtype:
            space = bucket_bytes if buckets else first_bytes
            buckets.append([])
        buckets[-1].append(i)
        space -= parameter.nbytes
    return buckets


@dataclass(frozen=True, eq=False)
class Piece:
    """This rank's part of one parameter: `tensor` is flat, and has its elements from `start` on."""

    parameter: nn.Parameter  # the full one, of the model
    start: int
    tensor: nn.Parameter


class Flat:
    """The layout of `parameters` of one dtype, one after the other, and which part is this rank's.

    `numel` and `shard_numel` count the padding at the end too: less than one number for each rank.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, ranks: int) -> None:
        self.parameters = parameters
        self.itemsize, self.is_trained = parameters[0].itemsize, parameters[0].requires_grad
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        self.shard_numel = -(-sum(self._sizes) // ranks)
        self.numel = self.shard_numel * ranks
        self.padding = self.numel - sum(self._sizes)
        self.mine = slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def views(self, full: Tensor) -> list[Tensor]:
        """Return each parameter's view of `full`, in the parameter's shape."""
        *parts, _ = full.split([*self._sizes, self.padding])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def pieces(self, shard: Tensor) -> list[tuple[int, Tensor]]:
        """Return, for each parameter, where this rank's piece of it begins, and its view of `shard`."""
        pieces, offset = [], 0
        for size in self._sizes:
            begin, end = max(self.mine.start, offset), min(self.mine.stop, offset + size)
            piece = shard[begin - self.mine.start : end - self.mine.start] if begin < end else shard[:0]
            pieces.append((max(0, begin - offset) if begin < end else 0, piece))
            offset += size
        return pieces


class ParameterBucket:
    """Some parameters in one flat tensor; `shard` is this rank's part of it, `pieces` what it has of each."""

    def __init__(self, name: str, parameters: list[nn.Parameter], rank: int, ranks: int) -> None:
        self.name, self.flat = name, Flat(parameters, rank, ranks)
        self.full = parameters[0].new_zeros(self.flat.numel)
        for parameter, view in zip(parameters, self.flat.views(self.full), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = self.full[self.flat.mine]
        self.pieces = [
            Piece(parameter, start, nn.Parameter(part))
            for parameter, (start, part) in zip(parameters, self.flat.pieces(self.shard), strict=True)
        ]
