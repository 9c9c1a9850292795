"""Compress a bucket of gradients: fewer bits for each number, fewer numbers, or two thin matrices.

      bf16       | 16 bits of each number |                              half of the bytes
      int8       | 8 bits of each number, and a scale for 1,024 of them | about a quarter
      topk       | the largest numbers of each rank, and their places |  8 bytes for each that is kept
      powersgd   M (n x m)  ~  P (n x r) times Q^T (r x m)               r (n + m) numbers in place of n m

Each compressor belongs to one bucket, and keeps the state that it needs from step to step. `mean(flat)`
replaces the bucket's gradients by an approximation of their mean over the ranks of a group, and returns what
this rank has contributed to it: its own gradients after compression. The difference is the error, which
train_compressed.py adds to the next step's gradients.

Numbers with few bits cannot be added up on their way through a ring: the sum of two int8 numbers overflows,
and each hop would round again. So with int8 each rank receives its chunk from every other rank (an
all-to-all), adds up in float32, rounds once more, and sends the result to all (an all-gather). A ring's
reduce-scatter and all-gather send as many messages, and four times the bytes.

For p ranks and a bucket of N float32 numbers (4 N bytes), a rank sends in bytes

      all-reduce   2 (p-1)/p 4 N                     in a ring, without compression
      bf16         2 (p-1)/p 2 N
      int8         2 (p-1)/p 1,028/1,024 N           N is rounded up to a multiple of 1,024 p
      topk         (p-1) 8 k                         grows with p: for a k of 1%, as all-reduce at p = 100
      powersgd     2 (p-1)/p 4 (V + r sum of (n + m))      V numbers are not in matrices

All ranks end with the same bytes, so their results are bitwise equal if their processors are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm.collectives import Group, all_gather, all_reduce, all_to_all
from comm.cost import expected_traffic
from lab.launch.errors import WorkbookError
from lab.trace.ledger import Traffic

BLOCK = 1024  # numbers that share a scale
ROW = BLOCK + 4  # bytes: a block in int8, and its scale in float32


class Compressor(ABC):
    """Averages a bucket that holds tensors of these shapes and this dtype, one after another in memory."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], group: Group = None, dtype: torch.dtype = torch.float32
    ) -> None:
        if dtype.is_complex:
            raise WorkbookError("Complex gradients cannot be compressed: take BucketDataParallel.")
        self.sizes, self.group = [math.prod(shape) for shape in shapes], group
        self.numel, self.dtype = sum(self.sizes), dtype
        self.ranks = dist.get_world_size(group)

    @abstractmethod
    def mean(self, flat: Tensor) -> Tensor:
        """Replace `flat` by about its mean over the ranks; return what this rank has contributed.

        All ranks call it for the same bucket. It returns when the mean is complete.
        """

    def snapshot(self) -> Any:  # noqa: B027
        """Return what is kept from one call of `mean` for the next; most keep nothing."""

    def restore(self, snapshot: Any) -> None:  # noqa: B027
        """Return to a snapshot, such as that before a step that overflowed."""

    @abstractmethod
    def traffic(self) -> Traffic:
        """Return what this rank sends in one call of `mean`."""


class Float32(Compressor):
    """Sends the numbers as they are: a plain all-reduce, for comparison."""

    def mean(self, flat: Tensor) -> Tensor:
        sent = flat.clone()
        all_reduce(flat, "mean", self.group)
        return sent

    def traffic(self) -> Traffic:
        return expected_traffic("all_reduce", None, self.numel, self.dtype.itemsize, self.group)


class Bf16(Compressor):
    """Sends the upper half of the bits of a float32 number: its sign, its exponent, 7 bits of its fraction.

    The range is that of float32; a number is rounded by at most 1/256 of its size. A ring also rounds the sum
    at each hop, which error feedback does not correct. torch: `bf16_compress_hook`.
    """

    def mean(self, flat: Tensor) -> Tensor:
        rounded = flat.bfloat16()
        sent = rounded.to(flat.dtype, copy=True)
        all_reduce(rounded, "mean", self.group)
        flat.copy_(rounded)
        return sent

    def traffic(self) -> Traffic:
        return expected_traffic("all_reduce", None, self.numel, 2, self.group)


class Int8(Compressor):
    """Sends each number as one of 255 levels, and a scale for each block of 1,024 numbers.

    level = round(number / scale), scale = (largest of the block) / 127

    A row of 1,028 bytes holds a block and its scale, so they travel in one message. Each rounding changes a
    number by at most half a scale. With one scale for all numbers the small ones would become zeros. The mean
    is rounded too, which error feedback does not correct. Seide et al. 2014 went down to one bit, with error
    feedback; 8 bits for a block are as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
    2021, https://arxiv.org/abs/2110.02861.
    """

    @property
    def rows(self) -> int:
        """Return the number of rows, with padding: each rank adds up as many as the others."""
        return math.ceil(self.numel / (BLOCK * self.ranks)) * self.ranks

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


class TopK(Compressor):
    """Sends the numbers that are largest in size on this rank, and their places in the bucket.

    The ranks choose different places, so their messages cannot be added up on the way: each rank gathers
    those of all ranks, and adds. Without error feedback most gradients would never be sent. Aji and Heafield,
    "Sparse Communication for Distributed Gradient Descent", 2017, https://arxiv.org/abs/1704.05021.
    """

    def __init__(self, *bucket: Any, share: float = 0.01, **options: Any) -> None:
        super().__init__(*bucket, **options)
        if not 0 < share <= 1:
            raise WorkbookError(f"topk sends a share of {share}: it is a number above 0, and at most 1.")
        self.k = max(1, round(share * self.numel))

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


class PowerSGD(Compressor):
    """Sends two thin matrices P (n x r) and Q (m x r) in place of each matrix M (n x m) of gradients.

          P = mean over ranks of M Q        one step of the power iteration
          P = orthonormal(P)                the same columns, at right angles and of length 1
          Q = mean over ranks of M^T P
          M = P Q^T                         the best approximation of the mean by these columns

    Both are linear in M, so they can be added up on the way, as gradients can, and all ranks get the mean of
    their matrices, approximated. The next step begins with this step's Q, so that P comes closer to the
    directions in which the gradients are largest. A tensor of more dims is a matrix of its first dim times
    the rest. What two thin matrices would not make smaller, such as a bias, travels as it is, with P.

    Numbers are computed and sent in float32, or in float64 if they are float64. Vogels, Karimireddy and
    Jaggi, "PowerSGD", NeurIPS 2019, https://arxiv.org/abs/1905.13727. torch's `powerSGD_hook` does the same;
    it keeps gradient - P Q^T on each rank, which has the same mean over ranks as the error here.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], *bucket: Any, rank: int = 4, **options: Any) -> None:
        super().__init__(shapes, *bucket, **options)
        if rank < 1:
            raise WorkbookError(f"powersgd's matrices have {rank} columns: it is a number from 1.")
        self.dtype = torch.promote_types(self.dtype, torch.float32)
        self.columns = rank
        self.shapes = [(shape[0] if shape else 1, math.prod(shape[1:])) for shape in shapes]
        random = torch.Generator().manual_seed(0)  # all ranks begin with the same Q
        self.qs = {
            i: torch.randn(columns, rank, generator=random)
            for i, (rows, columns) in enumerate(self.shapes)
            if (rows + columns) * rank < rows * columns
        }

    def mean(self, flat: Tensor) -> Tensor:
        whole = flat.to(self.dtype)
        sent = torch.empty_like(whole)
        matrices, own = self._matrices(whole), self._matrices(sent)
        vectors = [i for i in range(len(matrices)) if i not in self.qs]
        for i in vectors:
            own[i].copy_(matrices[i])
        ps = {i: matrices[i] @ orthonormal(q.to(whole)) for i, q in self.qs.items()}
        self._average([*ps.values(), *(matrices[i] for i in vectors)])
        ps = {i: orthonormal(p) for i, p in ps.items()}
        self.qs = {i: matrices[i].T @ p for i, p in ps.items()}
        for i, p in ps.items():
            torch.mm(p, self.qs[i].T, out=own[i])
        self._average(list(self.qs.values()))
        for i, p in ps.items():
            torch.mm(p, self.qs[i].T, out=matrices[i])
        flat.copy_(whole)
        return sent.to(flat.dtype)

    def snapshot(self) -> dict[int, Tensor]:
        return self.qs  # `mean` replaces it

    def restore(self, snapshot: dict[int, Tensor]) -> None:
        self.qs = snapshot

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        """Return a view of each tensor in the bucket, as a matrix."""
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.shapes, strict=True)]

    def _average(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over the ranks, with one all-reduce."""
        if not tensors:
            return
        together = torch.cat([tensor.flatten() for tensor in tensors])
        all_reduce(together, "mean", self.group)
        for tensor, mean in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def traffic(self) -> Traffic:
        thin = [self.shapes[i] for i in self.qs]
        rest = self.numel - sum(rows * columns for rows, columns in thin)
        sizes = [rest + self.columns * sum(rows for rows, _ in thin), self.columns * sum(c for _, c in thin)]
        size = self.dtype.itemsize
        sent = (expected_traffic("all_reduce", None, n, size, self.group) for n in sizes if n)
        return sum(sent, Traffic())


def orthonormal(matrix: Tensor) -> Tensor:
    """Return orthonormal columns that span those of the matrix; for a matrix of zeros, unit vectors.

    It is what Gram-Schmidt returns, but for the signs of columns, which P Q^T does not depend on.
    """
    return torch.linalg.qr(matrix).Q


COMPRESSORS: dict[str, type[Compressor]] = {
    "float32": Float32,
    "bf16": Bf16,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
}
