"""The entrance of every collective: the ranks show each other what they have come for.

gloo kills a receiver whose buffer has the wrong size, turns a wrong dtype into garbage without a word, and
leaves ranks that call different operations waiting for each other. So before the payload moves, every
rank's 64-byte header goes to every other one in ceil(log2 n) rounds (Bruck's all-gather), and when
they do not fit, *all* ranks raise the same sentence, and the group stays usable.

The rounds cost latency, and on busy cores a wake-up can cost milliseconds. The patterns that matter most
therefore start their first messages while the headers are under way (comm.transport.wire, "early").
"""

import struct
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

import torch

from comm.errors import CommError, Mismatch
from comm.shards import shard_sizes
from comm.transport.wire import Wire, global_ranks

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
PATTERNS = (
    *("flat", "tree", "ring", "pipelined_ring", "recursive_doubling", "halving_doubling"),
    *("pairwise", "tcp", "cma"),
)
REDUCTIONS = ("none", "sum", "mean", "max", "min", "product")
DTYPES = tuple(
    sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str),
)
SHARDED = ("scatter", "gather", "all_gather", "reduce_scatter")
_ROW = struct.Struct("=8q")
ROW_BYTES = _ROW.size


@dataclass(frozen=True)
class Header:
    """What one rank brings. `shard` and `full` count elements; 0 where a rank brings none.

    `ready` is not compared: since when a slow link could carry it (transport/slow_link.py), in nanoseconds.
    """

    op: str
    pattern: str
    dtype: torch.dtype
    reduction: str = "none"
    root: int = -1
    shard: int = 0
    full: int = 0
    ready: int = 0

    def pack(self) -> bytes:
        return _ROW.pack(
            OPS.index(self.op),
            PATTERNS.index(self.pattern),
            DTYPES.index(self.dtype),
            REDUCTIONS.index(self.reduction),
            self.root,
            self.shard,
            self.full,
            self.ready,
        )

    @staticmethod
    def unpack(row: bytes) -> "Header":
        op, pattern, dtype, reduction, *numbers = _ROW.unpack(row)
        return Header(OPS[op], PATTERNS[pattern], DTYPES[dtype], REDUCTIONS[reduction], *numbers)

    def __str__(self) -> str:
        how = f"{self.op}({self.pattern}"
        how += f", {self.reduction}" if self.reduction != "none" else ""
        how += f", root {self.root}" if self.root >= 0 else ""
        return f"{how}) of {self.full or self.shard} elements of {str(self.dtype).removeprefix('torch.')}"


class RowExchange:
    """All ranks' rows, by Bruck's all-gather; the first round is under way from the start.

    After round k a rank holds the rows of 2^(k+1) consecutive ranks from itself on (Bruck et al.,
    "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997).
    """

    def __init__(self, wire: Wire, row: torch.Tensor) -> None:
        self._wire = wire
        self._rows = torch.empty(wire.size, row.numel(), dtype=row.dtype)
        self._rows[0] = row
        self._have = 1
        self._start_round()

    def _start_round(self) -> None:
        n, r, have = self._wire.size, self._wire.rank, self._have
        if have < n:
            self._count = min(have, n - have)
            self._arriving = self._wire.irecv(
                self._rows[have : have + self._count], (r + have) % n, header=True
            )
            self._leaving = self._wire.isend(self._rows[: self._count], (r - have) % n, header=True)

    def finish(self) -> torch.Tensor:
        """Shape (ranks, len(row)), in rank order."""
        while self._have < self._wire.size:
            self._arriving.wait()
            self._leaving.wait()
            self._have += self._count
            self._start_round()
        return self._rows.roll(self._wire.rank, dims=0)


class HeaderExchange:
    """The exchange of headers, under way from the start."""

    def __init__(self, wire: Wire, mine: Header) -> None:
        row = torch.frombuffer(bytearray(mine.pack()), dtype=torch.int64)
        self._rows, self._names = RowExchange(wire, row), global_ranks(wire.group)

    def finish(self) -> int:
        """As `check_rows`."""
        return check_rows(self._rows.finish().numpy().tobytes(), self._names)


def wait_until_all_have_read(wire: Wire) -> None:
    """Return when all ranks have read all headers, so that this one may leave with a Mismatch.

    A rank that left at once would close connections on which a slower one still sends what comes behind its
    header: it would find them lost, and not read why. This is a dissemination barrier (Hensgen,
    Finkel and Manber, "Two algorithms for barrier synchronization", 1988). A peer that is lost here is past
    the barrier, or has died: both let this rank leave.
    """
    n, r, distance = wire.size, wire.rank, 1
    while distance < n:
        with suppress(CommError):
            leaving = wire.isend(torch.zeros(1), (r - distance) % n, header=True)
            try:
                wire.irecv(torch.empty(1), (r + distance) % n, header=True).wait()
            finally:
                leaving.wait()
        distance *= 2


def check_rows(rows: bytes, names: list[int]) -> int:
    """When the last of the ranks was ready, from all packed headers in rank order.

    Raises Mismatch, with the ranks' names, unless they fit together.
    """
    packed = [rows[at : at + ROW_BYTES] for at in range(0, len(rows), ROW_BYTES)]
    ready = [_ROW.unpack(row)[-1] for row in packed]
    # What is the same on all ranks fits, but for shards; and this is done for each collective.
    if len({row[:-8] for row in packed}) > 1 or Header.unpack(packed[0]).op in SHARDED:
        check_headers([Header.unpack(row) for row in packed], names)
    return max(ready)


def check_headers(headers: list[Header], names: list[int]) -> None:
    """Raises Mismatch, with the ranks' names, unless all agree and each shard is its part of the whole."""
    op = headers[0].op
    if op == "barrier":
        same = all(header.op == op for header in headers)
    elif op in ("scatter", "gather"):
        same = len({_common(header) for header in headers}) == 1
    else:
        same = len({(*_common(header), header.full) for header in headers}) == 1
    if not same:
        raise Mismatch(f"The ranks do not fit together: {_who_brings_what(headers, names)}. {_cure(headers)}")
    if op in SHARDED:
        _check_shards(headers, names)


def _check_shards(headers: list[Header], names: list[int]) -> None:
    whole = max(header.full for header in headers)
    for rank, size in enumerate(shard_sizes(whole, len(headers))):
        if headers[rank].shard != size:
            raise Mismatch(
                f"{headers[0].op}: the shard of rank {names[rank]} has {headers[rank].shard} elements, "
                f"but its part of {whole} on {len(headers)} ranks is {size} (see comm.shards.shard_sizes)."
            )


def _common(header: Header) -> tuple:
    return header.op, header.pattern, header.dtype, header.reduction, header.root


def _who_brings_what(headers: list[Header], names: list[int]) -> str:
    parties: dict[str, list[int]] = defaultdict(list)
    for name, header in zip(names, headers, strict=True):
        parties[str(header)].append(name)
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


def check_parts(wire: Wire, out_sizes: list[int], in_sizes: list[int]) -> None:
    """Raise Mismatch on every rank unless the parts that each rank sends are those that the others expect."""
    table = (
        RowExchange(wire, torch.tensor([out_sizes, in_sizes]).flatten())
        .finish()
        .view(wire.size, 2, wire.size)
    )
    expected, sent = table[:, 0, :], table[:, 1, :].T
    wrong = (expected != sent).nonzero().tolist()
    if wrong:
        (to, by), names = wrong[0], global_ranks(wire.group)
        raise Mismatch(
            f"all_to_all: rank {names[by]} sends {int(sent[to, by])} elements to rank {names[to]}, "
            f"which expects {int(expected[to, by])}; input_sizes[p] on rank r must be output_sizes[r] on "
            "rank p."
        )
