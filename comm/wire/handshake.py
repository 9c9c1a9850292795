"""Check at the start of every collective that all ranks have called the same one, with tensors that fit.

      rank 0   all_reduce(ring, sum) of 5 float32 ─┐              ┌─► compares all headers: either all ranks
      rank 1   all_reduce(ring, sum) of 6 float32 ─┴── exchange ──┴─► raise the same Mismatch, or all go on

gloo kills a receiver whose buffer has the wrong size, delivers garbage for a wrong dtype, and leaves ranks
that call different operations waiting for each other. So before the payload moves, every rank sends a 64-byte
header to every other rank, in ceil(log2 n) rounds. If the headers do not fit, *all* ranks raise the same
error, and the group stays usable.
"""

import struct
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from comm.errors import CommError, Mismatch
from comm.shards import shard_sizes
from comm.wire.groups import global_ranks
from comm.wire.wire import Wire

OPS = (
    *("barrier", "broadcast", "scatter", "gather", "reduce"),
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
)
PATTERN_NAMES = (
    *("flat", "tree", "ring", "pipelined_ring", "recursive_doubling", "halving_doubling"),
    *("pairwise", "bruck", "hierarchical"),
)
REDUCTIONS = ("none", "sum", "mean", "max", "min", "product")
DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
SHARDED = ("scatter", "gather", "all_gather", "reduce_scatter")
UNEVEN = -1  # as the shard of an all-to-all: the parts of this rank have different sizes
_ROW = struct.Struct("=8q")
_OP_NUMBERS, _PATTERN_NUMBERS, _DTYPE_NUMBERS, _REDUCTION_NUMBERS = (
    {name: number for number, name in enumerate(names)} for names in (OPS, PATTERN_NAMES, DTYPES, REDUCTIONS)
)
ROW_BYTES = _ROW.size


class Header(NamedTuple):
    """The description of one rank's call. `shard` and `full` count elements, 0 if a rank passes none.
    The `root` of an all-gather is its `tensor_id`, or -1.

    The `shard` of an all-to-all is one part. It is UNEVEN if the parts have different sizes. `ready` is not
    compared. It is the time, in nanoseconds, from which a simulated slow link could carry the payload.
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
        op, pattern = _OP_NUMBERS[self.op], _PATTERN_NUMBERS[self.pattern]
        dtype, reduction = _DTYPE_NUMBERS[self.dtype], _REDUCTION_NUMBERS[self.reduction]
        return _ROW.pack(op, pattern, dtype, reduction, *self[4:])

    @staticmethod
    def of(numbers: Sequence[int]) -> "Header":
        op, pattern, dtype, reduction, *others = numbers
        return Header(OPS[op], PATTERN_NAMES[pattern], DTYPES[dtype], REDUCTIONS[reduction], *others)

    def __str__(self) -> str:
        how = f"{self.op}({self.pattern}"
        how += f", {self.reduction}" if self.reduction != "none" else ""
        what = "tensor" if self.op == "all_gather" else "root"
        how += f", {what} {self.root}" if self.root >= 0 else ""
        return f"{how}) of {self.full or self.shard} elements of {str(self.dtype).removeprefix('torch.')}"


class RowExchange:
    """An all-gather of one row from each rank, as in bruck.py. The constructor starts the first round."""

    def __init__(self, wire: Wire, row: bytes) -> None:
        self._wire, self._row_bytes = wire, len(row)
        self._rows = bytearray(row) + bytearray((wire.size - 1) * len(row))
        self._have = 1
        self._start_round()

    def _start_round(self) -> None:
        n, r, have = self._wire.size, self._wire.rank, self._have
        if have < n:
            self._count = min(have, n - have)
            self._arriving = self._wire.irecv(self._part(have), (r + have) % n, header=True)
            self._leaving = self._wire.isend(self._part(0), (r - have) % n, header=True)

    def _part(self, first: int) -> torch.Tensor:
        """Return the rows that move in this round: as many as are missing or there, from the first one."""
        count, start = self._count * self._row_bytes, first * self._row_bytes
        return torch.frombuffer(self._rows, dtype=torch.uint8, count=count, offset=start)

    def finish(self) -> bytes:
        """Return all rows in rank order."""
        while self._have < self._wire.size:
            self._arriving.wait()
            self._leaving.wait()
            self._have += self._count
            self._start_round()
        here = (self._wire.size - self._wire.rank) * self._row_bytes  # the rows begin with that of this rank
        return bytes(self._rows[here:] + self._rows[:here])


def exchange_numbers(wire: Wire, mine: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the numbers of each rank, in rank order. All ranks pass equally many, of 64 bits."""
    row = struct.Struct(f"={len(mine)}q")
    return list(row.iter_unpack(RowExchange(wire, row.pack(*mine)).finish()))


class HeaderExchange:
    """The exchange of headers. It starts when made."""

    def __init__(self, wire: Wire, mine: Header) -> None:
        self._wire, self._mine, self._rows = wire, mine, RowExchange(wire, mine.pack())

    def finish(self) -> int:
        """Wait for all headers. Return the time when the last rank was ready.

        Raise Mismatch, which names the ranks, unless the headers fit together.
        """
        rows, op = list(_ROW.iter_unpack(self._rows.finish())), self._mine.op
        calls = {row[:-1] for row in rows}  # without `ready`
        self.has_even_parts = len(calls) == 1 and self._mine.shard != UNEVEN
        # Equal headers fit, unless there are shards of wrong sizes. Comparing numbers first saves time.
        if len(calls) > 1 or op in SHARDED:
            check_headers([Header.of(row) for row in rows], self._wire.group)
        return max(ready for *_, ready in rows)


def wait_until_all_have_read(wire: Wire) -> None:
    """Return when all ranks have read all headers, so that this rank may raise its Mismatch.

    A rank that raised it at once might exit, and a slower one would report a lost connection instead of the
    Mismatch. A connection that is lost here is ignored: the peer has passed this point, or has died.
    """
    with suppress(CommError):
        exchange_numbers(wire, [0])


def check_headers(headers: list[Header], group: dist.ProcessGroup) -> None:
    """Raise Mismatch unless all headers agree and each shard has the size of its part of the full tensor."""
    op = headers[0].op
    if op == "barrier":
        calls: set = {header.op for header in headers}
    elif op in ("scatter", "gather", "all_to_all"):
        calls = {header[:5] for header in headers}  # op, pattern, dtype, reduction and root
    else:
        calls = {(*header[:5], header.full) for header in headers}
    if len(calls) > 1:
        calls_by_rank = _calls_by_rank(headers, global_ranks(group))
        raise Mismatch(f"The ranks do not fit together: {calls_by_rank}. {_cure(headers)}")
    if op not in SHARDED:
        return
    full = max(header.full for header in headers)
    for rank, size in enumerate(shard_sizes(full, len(headers))):
        if headers[rank].shard != size:
            raise Mismatch(
                f"{op}: the shard of rank {global_ranks(group)[rank]} has {headers[rank].shard} elements, "
                f"but its part of {full} on {len(headers)} ranks is {size} (see comm.shards.shard_sizes)."
            )


def _calls_by_rank(headers: list[Header], names: list[int]) -> str:
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
        return "Every rank must pass tensors of the same dtype."
    if headers[0].op == "all_gather" and len({header.root for header in headers}) > 1:
        return "Every rank must gather the same tensors (layers) in the same order."
    return "Every rank must pass tensors of the same size, and the same pattern, reduction and root."


def check_parts(wire: Wire, out_sizes: list[int], in_sizes: list[int]) -> None:
    """Raise Mismatch on every rank unless each rank sends parts of the sizes that the others expect."""
    table = torch.tensor(exchange_numbers(wire, [*out_sizes, *in_sizes])).view(wire.size, 2, wire.size)
    expected, sent = table[:, 0, :], table[:, 1, :].T
    wrong = (expected != sent).nonzero().tolist()
    if wrong:
        (to, by), names = wrong[0], global_ranks(wire.group)
        raise Mismatch(
            f"all_to_all: rank {names[by]} sends {int(sent[to, by])} elements to rank {names[to]}, "
            f"which expects {int(expected[to, by])}; input_sizes[p] on rank r must be output_sizes[r] on "
            "rank p."
        )
    if wire.pattern == "bruck" and bool((table != table[0, 0, 0]).any()):
        raise Mismatch(
            "all_to_all: in the pattern bruck all parts of all ranks must have the same size; take pairwise."
        )
