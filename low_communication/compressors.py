"""Compress a bucket of gradients: fewer bits for each number, fewer numbers, or two thin matrices.

      bf16       | 16 bits of each number |                              half of the bytes
      int8       | 8 bits of each number, and a scale for 1,024 of them | about a quarter
      topk       | the largest numbers of each rank, and their places |  8 bytes for each that is kept
      powersgd   M (n x m)  ~  P (n x r) times Q^T (r x m)               r (n + m) numbers in place of n m

Each compressor belongs to one bucket, and keeps the state that it needs from step to step. `mean(flat)`
replaces the bucket's gradients by about their mean over the ranks of a group, and returns what this rank has
put into that mean: its own gradients as the others have seen them. The difference is the error, which
train_compressed.py adds to the next step's gradients.

Numbers with few bits cannot be added up on their way through a ring: the sum of two int8 numbers overflows,
and each hop would round again. So int8 sends each rank its chunk of all others (an all-to-all), adds up in
float32, rounds once more, and gathers. That is as many messages as a ring's halves, each of a quarter.

For n ranks and a bucket of N float32 numbers (4 N bytes), a rank sends in bytes

      all-reduce   2 (n-1)/n 4 N                     in a ring, without compression
      bf16         2 (n-1)/n 2 N
      int8         2 (n-1)/n 1,028/1,024 N
      topk         (n-1) 8 k                         which grows with n: it is an all-gather
      powersgd     2 (n-1)/n 4 (V + r sum of (rows + columns))      V numbers are not in matrices
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from comm.collectives import Group, all_gather, all_reduce, all_to_all
from comm.cost import expected_traffic
from lab.trace.ledger import Traffic

BLOCK = 1024  # numbers that share a scale
ROW = BLOCK + 4  # bytes: a block in int8, and its scale in float32


class Compressor(Protocol):
    """What the buckets of train_compressed.py need."""

    def mean(self, flat: Tensor) -> Tensor:
        """Replace `flat` by about its mean over the ranks; return what this rank has put into it.

        All ranks call it for the same bucket. It returns when all has arrived.
        """

    def traffic(self) -> Traffic:
        """Return what this rank is expected to send in one call of `mean`."""


class Float32:
    """Sends the numbers as they are: a plain all-reduce, for comparison."""

    def __init__(self, shapes: Sequence[torch.Size], group: Group = None, pattern: str | None = None) -> None:
        self.numel, self.group, self.pattern = sum(map(math.prod, shapes)), group, pattern

    def mean(self, flat: Tensor) -> Tensor:
        sent = flat.clone()
        all_reduce(flat, "mean", self.group, pattern=self.pattern)
        return sent

    def traffic(self) -> Traffic:
        return expected_traffic("all_reduce", self.pattern, self.numel, 4, self.group)


class Bf16:
    """Sends the upper half of the bits of a float32 number: its sign, its exponent, 7 bits of its fraction.

    The range is that of float32, so nothing overflows; a number is rounded by at most 1/256 of its size. The
    sum is rounded at each hop of a ring. torch calls this `bf16_compress_hook`.
    """

    def __init__(self, shapes: Sequence[torch.Size], group: Group = None, pattern: str | None = None) -> None:
        self.numel, self.group, self.pattern = sum(map(math.prod, shapes)), group, pattern

    def mean(self, flat: Tensor) -> Tensor:
        rounded = flat.bfloat16()
        sent = rounded.to(flat.dtype)
        all_reduce(rounded, "mean", self.group, pattern=self.pattern)
        flat.copy_(rounded)
        return sent

    def traffic(self) -> Traffic:
        return expected_traffic("all_reduce", self.pattern, self.numel, 2, self.group)


class Int8:
    """Sends each number as one of 255 levels, and a scale for each block of 1,024 numbers.

    level = round(number / scale), scale = (largest of the block) / 127

    A row of 1,028 bytes holds a block and its scale, so they travel in one message. The rounding error of a
    number is at most half a scale. With one scale for all numbers the small ones would become zeros. Seide et
    al. 2014 went down to one bit, with error feedback; 8 bits for a block are as in Dettmers et al.,
    "8-bit Optimizers via Block-wise Quantization", 2021, https://arxiv.org/abs/2110.02861.
    """

    def __init__(self, shapes: Sequence[torch.Size], group: Group = None, pattern: str | None = None) -> None:
        self.numel, self.group = sum(map(math.prod, shapes)), group
        self.ranks = dist.get_world_size(group)
        self.rows = math.ceil(self.numel / (BLOCK * self.ranks)) * self.ranks  # the same number for each rank

    def mean(self, flat: Tensor) -> Tensor:
        padded = torch.zeros(self.rows * BLOCK, device=flat.device)
        padded[: self.numel] = flat
        rows = pack(padded.view(-1, BLOCK))
        chunks = torch.empty_like(rows)
        all_to_all(chunks.view(-1), rows.view(-1), group=self.group)
        my_mean = unpack(chunks).view(self.ranks, -1, BLOCK).mean(0)
        full = torch.empty_like(rows)
        all_gather(full.view(-1), pack(my_mean).view(-1), self.group)
        flat.copy_(unpack(full).view(-1)[: self.numel])
        return unpack(rows).view(-1)[: self.numel].to(flat.dtype)

    def traffic(self) -> Traffic:
        size = self.rows * ROW, 1, self.group
        return expected_traffic("all_to_all", None, *size) + expected_traffic("all_gather", None, *size)


def pack(blocks: Tensor) -> Tensor:
    """Return rows of 1,028 bytes: 1,024 levels and the scale of each row of `blocks`."""
    scales = blocks.abs().amax(1, keepdim=True) / 127
    levels = (blocks / scales.where(scales > 0, 1)).round().to(torch.int8)
    return torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def unpack(rows: Tensor) -> Tensor:
    """Return the numbers of packed rows, in float32."""
    levels, scales = rows[:, :BLOCK].view(torch.int8), rows[:, BLOCK:].clone().view(torch.float32)
    return levels * scales


class TopK:
    """Sends the numbers that are largest in size on this rank, and their places in the bucket.

    The ranks choose different places, so their messages cannot be added up on the way: each rank gathers
    those of all ranks, and adds. Without error feedback most gradients would never be sent. Aji and Heafield,
    "Sparse Communication for Distributed Gradient Descent", 2017, https://arxiv.org/abs/1704.05021.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        group: Group = None,
        pattern: str | None = None,
        share: float = 0.01,
    ) -> None:
        numel = sum(map(math.prod, shapes))
        self.group, self.ranks, self.k = group, dist.get_world_size(group), max(1, round(share * numel))

    def mean(self, flat: Tensor) -> Tensor:
        places = flat.abs().topk(self.k, sorted=False).indices
        mine = torch.stack([places.int(), flat[places].float().view(torch.int32)])
        full = mine.new_empty(self.ranks, 2, self.k)
        all_gather(full.view(-1), mine.view(-1), self.group)
        sent = torch.zeros_like(flat)
        sent[places] = flat[places].float().to(flat.dtype)
        flat.zero_()
        for its_places, its_numbers in full:
            flat.index_add_(0, its_places.long(), its_numbers.view(torch.float32).to(flat.dtype) / self.ranks)
        return sent

    def traffic(self) -> Traffic:
        return expected_traffic("all_gather", None, self.ranks * 2 * self.k, 4, self.group)


class PowerSGD:
    """Sends two thin matrices P (rows x r) and Q (columns x r) in place of each matrix M of gradients.

          P = mean over ranks of M Q        one step of the power iteration; then its columns are made
          Q = mean over ranks of M^T P      orthonormal
          M is replaced by P Q^T            the best approximation of the mean by columns of P

    Both are linear in M, so they can be added up on the way, as gradients can, and all ranks get the mean of
    their matrices, approximated. Q is where the next step begins, so the iteration goes on from step to step.
    What is no matrix, such as biases, travels uncompressed with P. Vogels, Karimireddy and Jaggi, "PowerSGD",
    NeurIPS 2019, https://arxiv.org/abs/1905.13727; torch's `powerSGD_hook` is the same.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        group: Group = None,
        pattern: str | None = None,
        rank: int = 4,
        seed: int = 0,
    ) -> None:
        self.group, self.pattern, self.rank = group, pattern, rank
        self.sizes = [math.prod(shape) for shape in shapes]
        self.shapes = [
            (shape[0], size // shape[0]) if len(shape) > 1 else (size, 1)
            for shape, size in zip(shapes, self.sizes, strict=True)
        ]
        random = torch.Generator().manual_seed(seed)  # all ranks begin with the same Q
        self.qs = {
            i: torch.randn(columns, rank, generator=random)
            for i, (rows, columns) in enumerate(self.shapes)
            if (rows + columns) * rank < rows * columns
        }

    def mean(self, flat: Tensor) -> Tensor:
        sent = flat.clone()
        ms, own = (
            [part.view(shape) for part, shape in zip(x.split(self.sizes), self.shapes, strict=True)]
            for x in (flat, sent)
        )
        qs = {i: orthonormal(q.to(flat)) for i, q in self.qs.items()}
        ps = {i: ms[i] @ q for i, q in qs.items()}
        self._average([*ps.values(), *(m for i, m in enumerate(ms) if i not in qs)])
        ps = {i: orthonormal(p) for i, p in ps.items()}
        self.qs = {i: ms[i].T @ p for i, p in ps.items()}
        for i, p in ps.items():
            own[i].copy_(p @ self.qs[i].T)
        self._average(list(self.qs.values()))
        for i, p in ps.items():
            ms[i].copy_(p @ self.qs[i].T)
        return sent

    def _average(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over the ranks, in one message."""
        if not tensors:
            return
        together = torch.cat([tensor.flatten() for tensor in tensors])
        all_reduce(together, "mean", self.group, pattern=self.pattern)
        for tensor, mean in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def traffic(self) -> Traffic:
        thin = [self.shapes[i] for i in self.qs]
        rest = sum(self.sizes) - sum(rows * columns for rows, columns in thin)
        sizes = [rest + self.rank * sum(rows for rows, _ in thin), self.rank * sum(c for _, c in thin)]
        sent = (expected_traffic("all_reduce", self.pattern, n, 4, self.group) for n in sizes if n)
        return sum(sent, Traffic())


def orthonormal(matrix: Tensor) -> Tensor:
    """Return orthonormal columns with the same span (Gram-Schmidt, as LAPACK does it)."""
    return torch.linalg.qr(matrix).Q


COMPRESSORS: dict[str, type[Any]] = {
    "float32": Float32,
    "bf16": Bf16,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
}
