"""Lay parameters out in one flat tensor, and divide it into equal shards: all stages of ZeRO do this.

      parameters   |     weight 0      | bias 0 |      weight 1     |.|
      shards       |     rank 0     |     rank 1     |     rank 2     |    equal, with padding at the end
      pieces       |   weight 0     |w0| bias 0 |w 1 |   weight 1   |.|    the part of a parameter in a shard

A shard may begin and end in the middle of a parameter, so any parameters fit on any number of ranks. A
rank's *piece* of a parameter is a flat tensor; it is empty if the parameter is not in the rank's shard. An
optimizer that updates each number on its own does the same to pieces as to parameters.
"""

from dataclasses import dataclass

from torch import Tensor, nn


def fill(parameters: list[nn.Parameter], first_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """Divide parameters into buckets of neighbours of one dtype; return their positions, bucket by bucket.

    A bucket takes parameters until it has `bucket_bytes` (the first bucket: `first_bytes`). So its last
    parameter may make it larger than that.
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
    """The part of one parameter that is in this rank's shard: `tensor` is flat, `start` its first element."""

    parameter: nn.Parameter  # the full one, of the model
    start: int
    tensor: nn.Parameter


class Flat:
    """The layout of a flat tensor of `parameters` of one dtype; the slice `mine` of it is this rank's shard.

    `numel` and `shard_numel` include the padding at the end: less than one number for each rank.
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
        """Return for each parameter at which element its piece starts, and the piece, a view of `shard`."""
        pieces, offset = [], 0
        for size in self._sizes:
            begin, end = max(self.mine.start, offset), min(self.mine.stop, offset + size)
            piece = shard[begin - self.mine.start : end - self.mine.start] if begin < end else shard[:0]
            pieces.append((max(0, begin - offset) if begin < end else 0, piece))
            offset += size
        return pieces


class ParameterBucket:
    """A flat tensor `full` of parameters, this rank's `shard` of it, and the shard's `pieces` of each."""

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
