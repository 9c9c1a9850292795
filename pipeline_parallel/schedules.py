"""Make schedules: the order in which each rank of a pipeline does its forwards and backwards.

Each function returns a schedule as a table of actions, with a row for each rank. It builds a row phase by
phase, with one loop for each phase: warmup, steady state, cooldown. `row.add("FB", stage)` adds the next
forward of that stage and then its next backward. In the pictures a forward takes one column and a backward
two, or one for each of its halves I and W. A dot is a column in which the rank is idle. Small letters are the
actions of a rank's second stage.

There are p ranks and m microbatches. A forward takes f seconds, and a backward b = i + w: i for the gradient
of the stage's input, w for the gradients of its weights. theory.py has the formulas of idle time and memory.
All arguments must be at least 1, and a ValueError says which one is not.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from pipeline_parallel.actions import Action, Table


class _Row:
    """A row that grows action by action. For each kind and stage, microbatches come in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[str, int]] = Counter()

    def add(self, kinds: str, stage: int) -> None:
        """Add an action of each kind, such as "FB", for the next microbatch that had none of that kind."""
        for kind in kinds:
            halves = "IW" if kind == "B" else kind  # a B is an I and a W
            self.actions.append(Action(kind, self._next[halves[0], stage], stage))
            self._next.update((half, stage) for half in halves)


def naive(stages: int, microbatches: int) -> Table:
    """Return naive model parallelism: a microbatch is done with all stages before the next one starts.

        rank 0   F0 .  .  .  .  .  .  B0--- F1 .  .  .  .  .  .  B1---
        rank 1   .  F0 .  .  .  B0--- .  .  .  F1 .  .  .  B1--- .  .
        rank 2   .  .  F0 B0--- .  .  .  .  .  .  F1 B1--- .  .  .  .

    One rank works at a time, so each rank is idle for (p-1)/p of the time, with any number of microbatches.
    A rank holds one microbatch. Huang et al., "GPipe", 2019, arXiv:1811.06965, figure 2b.
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
    """Return GPipe's forwards as ticks of a clock: the pairs (microbatch, stage) that run at the same time.

        tick 0   (0,0)                  Within a tick no pair waits for another, so a process with several
        tick 1   (1,0) (0,1)            devices can start all of them. Between two ticks each output goes
        tick 2   (2,0) (1,1) (0,2)      to the next stage.
        tick 3         (2,1) (1,2)
        tick 4               (2,2)

    There are m + p - 1 ticks, with p stages. Kim et al., "torchgpipe", 2020, arXiv:2004.09910, section 3.2.
    """
    _check(stages=stages, microbatches=microbatches)
    return (
        [(tick - stage, stage) for stage in range(stages) if 0 <= tick - stage < microbatches]
        for tick in range(microbatches + stages - 1)
    )


def gpipe(stages: int, microbatches: int) -> Table:
    """Return GPipe: all forwards, then all backwards, microbatches in the same order.

        rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
        rank 1   .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .
        rank 2   .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .

    Each rank is idle for (p-1)/(m+p-1) of the time, so more microbatches mean less idle time. But each rank
    holds the activations of all m microbatches. Huang et al., "GPipe", 2019, arXiv:1811.06965.
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
    """Return 1F1B: after some forwards, each rank does one forward and one backward in turn.

        rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .

    Rank r begins with p-1-r forwards, one for each rank after it. (The picture shows one more: the steady
    state begins with a forward, too.) With fewer the ranks after it would wait for work; with more it would
    hold more, and gain no time. From then on a backward follows each forward and frees the activations of
    one microbatch. So a rank holds at most p - rank microbatches of any number. The bubble is that of GPipe.

    Rank 0 above has the warmup F0 F1, the steady state F2 B0 F3 B1 and the cooldown B2 B3. Narayanan et al.,
    "PipeDream", 2019; with all gradients of a batch before the optimizer's step, as here, in their
    "Memory-Efficient Pipeline-Parallel DNN Training", 2021, arXiv:2006.09503.
    """
    _check(stages=stages, microbatches=microbatches)
    table = []
    for stage in range(stages):
        row = _Row()
        warmup = min(microbatches, stages - 1 - stage)
        for _ in range(warmup):  # warmup
            row.add("F", stage)
        for _ in range(microbatches - warmup):  # steady state
            row.add("FB", stage)
        for _ in range(warmup):  # cooldown
            row.add("B", stage)
        table.append(row.actions)
    return table


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Table:
    """Return interleaved 1F1B: each rank has several stages, and stage s is on rank s % p.

        rank 0   F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
        rank 1   .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .  .

    A microbatch visits every rank `chunks` times, and each visit is `chunks` times shorter. So is the idle
    time: the bubble is (p-1)/(chunks m + p-1), for m >= p. The price: about `chunks` times as many messages,
    and more activations, those of the warmup and one more. Microbatches go in rounds of p: the microbatches
    of a round go through all stages of a rank before those of the next round enter. If p does not divide m,
    the rounds are larger, and as even as possible. Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", 2021, arXiv:2104.04473, section 2.2.
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
        for chunk, back in zip(forwards[warmup:], backwards[:steady], strict=True):  # steady state
            row.add("F", chunk * ranks + rank)
            row.add("B", back * ranks + rank)
        for back in backwards[steady:]:  # cooldown
            row.add("B", back * ranks + rank)
        table.append(row.actions)
    return table


def zb_h1(stages: int, microbatches: int) -> Table:
    """Return ZB-H1: 1F1B with backwards in two halves. The stage before waits for I, and W fills idle time.

        rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r puts each W off by r backwards. So the last ranks, which would be idle at the end, have the most W
    left for that time. A rank is idle for (p-1)(f+i-w) if m >= p and w is the shortest of the three: a third
    of 1F1B's bubble if f = i = w. Every rank holds p microbatches, as rank 0 does in 1F1B. Qi et al.,
    "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, section 2.
    """
    _check(stages=stages, microbatches=microbatches)
    table = []
    for stage in range(stages):
        row = _Row()
        warmup = min(microbatches, stages - 1 - stage)
        steady = microbatches - warmup
        for _ in range(warmup):  # warmup
            row.add("F", stage)
        for backward in range(steady):  # steady state
            row.add("FIW" if backward >= stage else "FI", stage)
        for backward in range(steady, microbatches):  # cooldown
            row.add("IW" if backward >= stage else "I", stage)
        for _ in range(min(microbatches, stage)):  # the weight gradients put off
            row.add("W", stage)
        table.append(row.actions)
    return table


def zb_v(ranks: int, microbatches: int) -> Table:
    """Return ZB-V: two stages on each rank, down the ranks and up again. Rank r has stages r and 2p-1-r.

        rank 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 .
        rank 1   .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2

    The first and the last stage are on the same rank, so the first backward comes early. If f = i = w and
    m >= 2p-1, a rank that has started is never idle. Every rank holds 2p microbatches of stages of half the
    size, which is as much as rank 0 holds in 1F1B. With fewer microbatches the order is that for 2p-1, and
    the microbatches that do not exist are left out. Qi et al., 2023, arXiv:2401.10241, section 6.
    """
    _check(ranks=ranks, microbatches=microbatches)
    filling = max(microbatches, 2 * ranks - 1)
    table = []
    for rank in range(ranks):
        row = _Row()
        down, up = rank, 2 * ranks - 1 - rank
        for _ in range(2 * (ranks - rank) - 1):  # warmup, until microbatch 0 comes back up
            row.add("F", down)
        for _ in range(rank):  # warmup, in both arms of the V
            row.add("F", up)
            row.add("F", down)
        for _ in range(ranks - rank):  # warmup, the first backwards
            row.add("FIW", up)
        for _ in range(filling - (2 * ranks - 1 - rank)):  # steady state
            row.add("FIW", down)
            row.add("FIW", up)
        for _ in range(ranks - 1 - rank):  # steady state, when no new microbatch comes
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


def dualpipe_v(ranks: int, microbatches: int) -> Table:
    """Return DualPipeV: the stages of ZB-V, with a forward of one arm beside a backward of the other.

        rank 0   F0 F1 F2 f0 i0 w0 f1 F3 b1--- f2 B0--- b2--- f3 .  B1--- b3--- I2 W2 I3 W3
        rank 1   .  F0 f0 F1 f1 F2 b0--- f2 B0--- F3 b1--- f3 B1--- b2--- B2--- i3 I3 w3 W3

    In the steady state each forward is in a pair with a backward of the rank's other stage. In production the
    two run at the same time, and one computes while the other one communicates: that hides the all-to-alls of
    experts. Here a pair is its F and then its B, one after the other, so nothing is hidden. Only the p-1-r
    first backwards of rank r and the p last ones are cut in halves, where a rank would wait.

    If f = i = w and m >= 2p, a rank is idle as long as in ZB-V, (p-1) f/2. But every rank holds 2p+1
    microbatches of stages of half the size, one more than in ZB-V: in a pair the forward comes first. If the
    two of a pair end together, idle time is (p-1) (f+2i-w)/2 for f = i, the report's (F&B + B - 3W) for each
    rank after the first. With fewer than 2p microbatches the order is that for 2p, and the others are left
    out. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, section 3.2.1, has DualPipe, on
    twice as many ranks; Sea AI Lab, "Cut-in-half", 2025, made it a V: https://hackmd.io/@ufotalent/r1lVXsa9Jg.
    """
    _check(ranks=ranks, microbatches=microbatches)
    filling = max(microbatches, 2 * ranks)
    table = []
    for rank in range(ranks):
        row = _Row()
        down, up = rank, 2 * ranks - 1 - rank
        both = [up, down] * (rank + 1)
        halved = both[rank + 1 :] + [down] * (ranks - 1 - rank)  # the stages of the last backwards
        for _ in range(2 * (ranks - 1 - rank)):  # warmup, until microbatch 0 comes back up
            row.add("F", down)
        for _ in range(rank + 1):  # warmup, in both arms
            row.add("F", down)
            row.add("F", up)
        for _ in range(ranks - 1 - rank):  # warmup, the first backwards
            row.add("IWF", up)
        for _ in range(filling - (2 * ranks - 1 - rank)):  # steady state, in pairs
            row.add("F", down)
            row.add("B", up)
            row.add("F", up)
            row.add("B", down)
        for _ in range(ranks - 1 - rank):  # steady state, when no new microbatch comes
            row.add("BF", up)
            row.add("B", down)
        for stage in both[: rank + 1]:  # cooldown, in both arms
            row.add("B", stage)
        for stage in halved[: rank + 1]:
            row.add("I", stage)
        for stage, oldest in zip(halved[rank + 1 :], halved, strict=False):  # cooldown, the last backwards
            row.add("W", oldest)
            row.add("I", stage)
        for stage in halved[ranks - 1 - rank :]:  # the weight gradients put off
            row.add("W", stage)
        table.append([action for action in row.actions if action.microbatch < microbatches])
    return table


SCHEDULES: dict[str, Callable[..., Table]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
}
"""The schedules by the names that scripts use."""

V_SHAPED = ("zb_v", "dualpipe_v")  # down the ranks and up again


def stages_per_rank(name: str, chunks: int = 2) -> int:
    """Return how many stages a rank has in the schedule of that name; `chunks` is for `interleaved` alone."""
    return {"interleaved": chunks, **dict.fromkeys(V_SHAPED, 2)}.get(name, 1)


def table_of(name: str, ranks: int, microbatches: int, chunks: int = 2) -> Table:
    """Return the schedule of that name for this number of ranks; `chunks` is for `interleaved` alone."""
    options = {"chunks": chunks} if name == "interleaved" else {}
    return SCHEDULES[name](ranks, microbatches, **options)


def _rounds(ranks: int, microbatches: int) -> list[int]:
    """Return the size of each round: at least `ranks`, as even as possible, the larger rounds first."""
    number = max(1, microbatches // ranks)
    return [microbatches // number + (i < microbatches % number) for i in range(number)]


def _check(**numbers: int) -> None:
    """Raise ValueError for a number below 1, such as _check(stages=0). Each schedule begins with it."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"A pipeline's number of {name} must be at least 1, not {number}.")
