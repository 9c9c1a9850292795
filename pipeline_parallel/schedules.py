"""Schedules: in which order each rank of a pipeline does its forwards and backwards.

Each function writes one down as a table of actions, a row for each rank, and does nothing else. Read a
schedule off its loops: they are its phases in order, one loop each. In the pictures a forward takes one
column and a backward two (or one each for its halves I and W), dots are idle time, and small letters stand
for a rank's second stage.

There are p ranks and m microbatches; f, i and w are the times of one stage's F, I and W, and b = i + w.

                 rank 0 is idle, from its    a rank holds at most so many microbatches' activations,
                 first to its last action    from F to the end of B or W
    naive        (p-1) (f+b) m               1
    gpipe        (p-1) (f+b)                 m
    1f1b         (p-1) (f+b)                 p - rank
    interleaved  (p-1) (f+b)                 (chunks-1) round + 2 (p-1-rank) + 1, in smaller stages
    zb_h1        (p-1) (f+i-w)               p
    zb_v         0 where f = i = w           2 p, in stages of half the size

The same model cut into `chunks` times as many stages has f and b as many times shorter. With few microbatches
some are idle for longer. Any numbers of at least 1 will do; under that, a ValueError says which.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from pipeline_parallel.actions import FORWARD, Action, Table


class _Row:
    """A row in the making. Each kind of action goes through each stage's microbatches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[str, int]] = Counter()

    def add(self, kinds: str, stage: int) -> None:
        """One action of each of the kinds, as "FB", each for the next microbatch it has not had."""
        for kind in kinds:
            self.actions.append(Action(kind, self._next[kind, stage], stage))
            self._next[kind, stage] += 1


def naive(stages: int, microbatches: int) -> Table:
    """Model parallelism without a pipeline: a microbatch is all done before the next one starts.

        rank 0   F0 .  .  .  .  .  .  B0--- F1 .  .  .  .  .  .  B1---
        rank 1   .  F0 .  .  .  B0--- .  .  .  F1 .  .  .  B1--- .  .
        rank 2   .  .  F0 B0--- .  .  .  .  .  .  F1 B1--- .  .  .  .

    One rank works at a time, so the ranks are idle for (p-1)/p of it, however many microbatches there are.
    A stage holds one microbatch. Huang et al., "GPipe", 2019, arXiv:1811.06965, figure 2b.
    """
    _check(stages=stages, microbatches=microbatches)
    table = []
    for stage in range(stages):
        row = _Row()
        for _ in range(microbatches):
            row.add("FB", stage)
        table.append(row.actions)
    return table


def clock_cycles(microbatches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """GPipe's forwards as ticks of a clock: what (microbatch, stage) pairs run side by side in each.

        tick 0   (0,0)                  Within a tick no pair waits for another, so a process with several
        tick 1   (1,0) (0,1)            devices can start all of them; between ticks the outputs move on
        tick 2   (2,0) (1,1) (0,2)      by one stage.
        tick 3         (2,1) (1,2)
        tick 4               (2,2)

    m + p - 1 ticks. Kim et al., "torchgpipe", 2020, arXiv:2004.09910, section 3.2.
    """
    _check(stages=stages, microbatches=microbatches)
    return (
        [(tick - stage, stage) for stage in range(stages) if 0 <= tick - stage < microbatches]
        for tick in range(microbatches + stages - 1)
    )


def gpipe(stages: int, microbatches: int) -> Table:
    """All forwards, then all backwards, microbatches in the same order.

        rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
        rank 1   .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .
        rank 2   .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .

    The ranks are idle for (p-1)/(m+p-1) of the time: the more microbatches the less. But each stage holds
    all m of them. Huang et al., "GPipe", 2019, arXiv:1811.06965.
    """
    _check(stages=stages, microbatches=microbatches)
    table = []
    for stage in range(stages):
        row = _Row()
        for _ in range(microbatches):  # all forwards
            row.add("F", stage)
        for _ in range(microbatches):  # all backwards
            row.add("B", stage)
        table.append(row.actions)
    return table


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """One forward, one backward: once full, a rank lets go of a microbatch for each that it takes in.

        rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .

    GPipe's bubble, but a stage holds p - rank microbatches at most, however many there are. Narayanan et al.,
    "PipeDream", 2019; with a flush after each batch, as here, in their "Memory-Efficient Pipeline-Parallel
    DNN Training", 2021, arXiv:2006.09503.
    """
    _check(stages=stages, microbatches=microbatches)
    table = []
    for stage in range(stages):
        row = _Row()
        warmup = min(microbatches, stages - 1 - stage)
        for _ in range(warmup):  # warmup
            row.add("F", stage)
        for _ in range(microbatches - warmup):  # steady
            row.add("FB", stage)
        for _ in range(warmup):  # cooldown
            row.add("B", stage)
        table.append(row.actions)
    return table


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Table:
    """1F1B where each rank has several stages, far apart in the model: stage s is on rank s % p.

        rank 0   F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
        rank 1   .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .  .

    A microbatch passes every rank `chunks` times, in steps as many times shorter, and so is the bubble:
    (p-1)/(chunks m + p-1) of the time, for m >= p. The price is as many times the messages, and more held:
    the warmup and one. Microbatches go in rounds of about p: a round visits all of a rank's stages before
    the next one enters. Where p does not divide m, the rounds are somewhat larger, and as even as can be.
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    2021, arXiv:2104.04473, section 2.2.
    """
    _check(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rounds = _rounds(ranks, microbatches)
    forwards = [chunk for size in rounds for chunk in range(chunks) for _ in range(size)]
    backwards = [chunks - 1 - chunk for chunk in forwards]
    table = []
    for rank in range(ranks):
        row = _Row()
        warmup = min(len(forwards), (chunks - 1) * rounds[0] + 2 * (ranks - 1 - rank))
        steady = len(forwards) - warmup
        for chunk in forwards[:warmup]:  # warmup
            row.add("F", chunk * ranks + rank)
        for chunk, back in zip(forwards[warmup:], backwards[:steady], strict=True):  # steady
            row.add("F", chunk * ranks + rank)
            row.add("B", back * ranks + rank)
        for back in backwards[steady:]:  # cooldown
            row.add("B", back * ranks + rank)
        table.append(row.actions)
    return table


def zb_h1(stages: int, microbatches: int) -> Table:
    """1F1B whose backward is cut in two: the previous stage waits for I only, and W fills what was idle.

        rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    A microbatch's W waits for as many backwards as the rank's number, so that the last ranks, which have
    to wait at the end, have the most left to do there. Idle for (p-1)(f+i-w) where m >= p and w is the
    shortest: a third of 1F1B's bubble where all are alike. Every rank holds p microbatches, as rank 0 does
    in 1F1B. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, section 2.
    """
    _check(stages=stages, microbatches=microbatches)
    table = []
    for stage in range(stages):
        row = _Row()
        warmup = min(microbatches, stages - 1 - stage)
        steady = microbatches - warmup
        for _ in range(warmup):  # warmup
            row.add("F", stage)
        for backward in range(steady):  # steady
            row.add("FIW" if backward >= stage else "FI", stage)
        for backward in range(steady, microbatches):  # cooldown
            row.add("IW" if backward >= stage else "I", stage)
        for _ in range(min(microbatches, stage)):  # the weight gradients put off
            row.add("W", stage)
        table.append(row.actions)
    return table


def zb_v(ranks: int, microbatches: int) -> Table:
    """Two stages a rank, in a V: down the ranks and up again; rank r has stages r and 2p-1-r.

        rank 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 .
        rank 1   .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2

    The last stage is where the first one is, so the first backward is soon back, and a rank once started
    is never idle, if f = i = w and m >= 2p-1. Held are 2p microbatches in stages of half the size: as much
    as rank 0 holds in 1F1B, on every rank. With fewer microbatches the order is that of 2p-1, without
    those that do not exist. Qi et al., 2023, arXiv:2401.10241, section 6.
    """
    _check(ranks=ranks, microbatches=microbatches)
    filling = max(microbatches, 2 * ranks - 1)
    table = []
    for rank in range(ranks):
        row = _Row()
        down, up = rank, 2 * ranks - 1 - rank
        for _ in range(2 * (ranks - rank) - 1):  # warmup, until microbatch 0 comes back up
            row.add("F", down)
        for _ in range(rank):  # warmup, in both arms
            row.add("F", up)
            row.add("F", down)
        for _ in range(ranks - rank):  # warmup, the first backwards
            row.add("FIW", up)
        for _ in range(filling - (2 * ranks - 1 - rank)):  # steady
            row.add("FIW", down)
            row.add("FIW", up)
        for _ in range(ranks - 1 - rank):  # steady, nothing new comes in
            row.add("IW", down)
            row.add("FIW", up)
        for _ in range(rank):  # cooldown, in both arms
            row.add("I", down)
            row.add("I", up)
        for _ in range(ranks - rank):  # cooldown, the last backwards
            row.add("IW", down)
        for _ in range(rank):  # the weight gradients put off
            row.add("W", up)
        for _ in range(rank):
            row.add("W", down)
        table.append([action for action in row.actions if action.microbatch < microbatches])
    return table


def forward_only(table: Table) -> Table:
    """Return the forwards of a table, in its order: what the ranks do to evaluate the model.

        rank 0   F0 F1 F2 F3 .  .
        rank 1   .  F0 F1 F2 F3 .
        rank 2   .  .  F0 F1 F2 F3

    This is what is left of every schedule with one stage on each rank, of `naive` too: no gradient comes
    back, so no rank waits for one. The ranks finish after (m+p-1) f, and hold one microbatch at a time.
    """
    return [[action for action in row if action.kind == FORWARD] for row in table]


# Each under the name that scripts know it by, called alike. Looked up late, so that a replacement counts.
SCHEDULES: dict[str, Callable[[int, int, int], Table]] = {
    "naive": lambda ranks, microbatches, chunks: naive(ranks, microbatches),
    "gpipe": lambda ranks, microbatches, chunks: gpipe(ranks, microbatches),
    "1f1b": lambda ranks, microbatches, chunks: one_f_one_b(ranks, microbatches),
    "interleaved": lambda ranks, microbatches, chunks: interleaved_1f1b(ranks, microbatches, chunks),
    "zb_h1": lambda ranks, microbatches, chunks: zb_h1(ranks, microbatches),
    "zb_v": lambda ranks, microbatches, chunks: zb_v(ranks, microbatches),
}


def stages_per_rank(name: str, chunks: int = 2) -> int:
    """How many stages a rank has in the schedule of that name; `chunks` is for `interleaved` alone."""
    _check_name(name)
    return {"interleaved": chunks, "zb_v": 2}.get(name, 1)


def table_of(name: str, ranks: int, microbatches: int, chunks: int = 2) -> Table:
    """The schedule of that name for so many ranks; `chunks` is for `interleaved` alone.

    ValueError for an unknown name, and where any of the numbers is under 1.
    """
    _check_name(name)
    return SCHEDULES[name](ranks, microbatches, chunks)


def _rounds(ranks: int, microbatches: int) -> list[int]:
    """The rounds' sizes, `ranks` microbatches or a few more: as even as can be, the larger ones first."""
    number = max(1, microbatches // ranks)
    return [microbatches // number + (i < microbatches % number) for i in range(number)]


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"A pipeline needs {name} of at least 1, not {number}.")


def _check_name(name: str) -> None:
    if name not in SCHEDULES:
        raise ValueError(f"There is no schedule {name!r}: choose one of {', '.join(SCHEDULES)}.")
