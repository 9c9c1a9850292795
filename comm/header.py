"""The entrance of every collective: the ranks show each other what they have come for.

gloo kills a receiver whose buffer has the wrong size, turns a wrong dtype into garbage without a word, and
leaves ranks that call different operations waiting for each other. So before the payload moves, every
rank's 64-byte header goes to every other one in ceil(log2 n) rounds (Bruck's all-gather), and when
they do not fit, *all* ranks raise the same sentence. Nothing is in flight then: the group stays usable.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch

from comm.wire import CommError, Wire

OPS = (
    "barrier",
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
)
PATTERNS = ("flat", "tree", "ring", "recursive_doubling", "halving_doubling", "pairwise")
REDUCTIONS = ("none", "sum", "mean", "max", "min", "product")
DTYPES = tuple(
    sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str),
)
ROW_BYTES = 64


@dataclass(frozen=True)
class Header:
    """What one rank brings. `shard` and `full` count elements; 0 where a rank brings none."""

    op: str
    pattern: str
    dtype: torch.dtype
    reduction: str = "none"
    root: int = -1
    shard: int = 0
    full: int = 0

    def pack(self) -> torch.Tensor:
        row = (
            OPS.index(self.op),
            PATTERNS.index(self.pattern),
            DTYPES.index(self.dtype),
            REDUCTIONS.index(self.reduction),
            self.root,
            self.shard,
            self.full,
            0,
        )
        return torch.tensor(row, dtype=torch.int64)

    @staticmethod
    def unpack(row: list[int]) -> "Header":
        op, pattern, dtype, reduction, root, shard, full, _ = row
        return Header(OPS[op], PATTERNS[pattern], DTYPES[dtype], REDUCTIONS[reduction], root, shard, full)

    def __str__(self) -> str:
        how = f"{self.op}({self.pattern}"
        how += f", {self.reduction}" if self.reduction != "none" else ""
        how += f", root {self.root}" if self.root >= 0 else ""
        return f"{how}) of {self.full or self.shard} elements of {str(self.dtype).removeprefix('torch.')}"


def exchange_rows(wire: Wire, row: torch.Tensor) -> torch.Tensor:
    """All ranks' rows, shape (ranks, len(row)), in rank order: Bruck's all-gather.

    After round k a rank holds the rows of 2^(k+1) consecutive ranks from itself on (Bruck et al.,
    "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997).
    """
    n, r = wire.size, wire.rank
    rows = torch.empty(n, row.numel(), dtype=row.dtype)
    rows[0] = row
    have = 1
    while have < n:
        count = min(have, n - have)
        arriving = wire.irecv(rows[have : have + count], (r + have) % n)
        leaving = wire.isend(rows[:count], (r - have) % n, booked_as="header")
        arriving.wait()
        leaving.wait()
        have += count
    return rows.roll(r, dims=0)


def agree(wire: Wire, mine: Header) -> list[Header]:
    """Exchange headers and return all of them in rank order.

    Raises CommError, on every rank, unless all agree in everything but their shard's size.
    """
    headers = [Header.unpack(row) for row in exchange_rows(wire, mine.pack()).tolist()]
    if mine.op == "barrier":
        same = all(header.op == "barrier" for header in headers)
    elif mine.op in ("scatter", "gather"):
        same = len({_common(header) for header in headers}) == 1
    else:
        same = len({(*_common(header), header.full) for header in headers}) == 1
    if not same:
        raise CommError(f"The ranks do not fit together: {_who_brings_what(headers)}. {_cure(headers)}")
    return headers


def _common(header: Header) -> tuple:
    return header.op, header.pattern, header.dtype, header.reduction, header.root


def _who_brings_what(headers: list[Header]) -> str:
    parties: dict[str, list[int]] = defaultdict(list)
    for rank, header in enumerate(headers):
        parties[str(header)].append(rank)
    return "; ".join(
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}: {what}"
        for what, ranks in parties.items()
    )


def _cure(headers: list[Header]) -> str:
    if len({header.op for header in headers}) > 1:
        return "Every rank must call the same collectives in the same order."
    if len({header.dtype for header in headers}) > 1:
        return "Every rank must bring the same dtype."
    return "Every rank must bring the same size and ask for the same."
