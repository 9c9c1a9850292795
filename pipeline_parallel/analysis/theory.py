"""Compute the cost of a schedule by formula: its makespan, its bubble, and how much each rank holds.

There are p ranks and m microbatches. f, i and w are the seconds of a rank for the forward, the input gradient
and the weight gradient of one microbatch, all its stages together, and b = i + w is a backward. All ranks are
equally fast, and messages take no time. Then every rank computes for m (f+b) seconds of the makespan, and is
idle for

    naive         m (p-1) (f+b)                          always
    gpipe, 1f1b   (p-1) (f+b)                            always; they differ in what they hold
    interleaved   (p-1) (f+b) / v                        for m >= p, with v stages on each rank
                  (p-m) (f+b) + (m-1) (f+b) / v          for m <= p
    zb_h1         (p-1) (f+i-w)                          for m >= p, w <= f and w <= i
                  (p-1) (f+i) - (k-1) min(f, i, w)       always, with k = min(m, p)
    zb_v          (p-1) i/2                              for m >= 2p-1, f <= i and i/2 <= w <= i
                  max((p-1)/2, 2p-1-m) f                 for f = i = w
    dualpipe_v    (p-1) (f+i-w)/2                        for m >= 2p, w <= i <= p f/(p-1) and f <= i+w
                  ((p-1)/2 + 2p-m) f                     for f = i = w and p < m <= 2p
                  ((p-1)/2 + 2p-1-m) f                   for f = i = w and m <= p

The bubble is the idle share of the makespan; some papers divide the idle time by m (f+b) instead. The zero
bubble paper counts the time of a rank from its own first action to its own last one, in which zb_v is never
idle. Here the time of all ranks starts together, and rank p-1 does nothing for (p-1) f/2 before it gets its
first microbatch.

A rank holds a microbatch of a stage from its forward to the end of its backward. At most, at a time, it holds

    naive         1
    gpipe         m
    1f1b          min(m, p-rank)
    interleaved   min(m v, (v-1) r + 2 (p-1-rank) + 1)   r microbatches in the first round: p if p divides m
    zb_h1         min(m, p)
    zb_v          min(2p, 2m, m+1+rank)                  of half a rank's layers each
    dualpipe_v    min(2p+1, 2m, m+1+rank)                of half a rank's layers each

Sources: naive and gpipe, Huang et al., "GPipe", 2019, arXiv:1811.06965, section 2.3. 1f1b and interleaved,
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
arXiv:2104.04473, section 2.2, for multiples m of p. zb_h1 and zb_v, Qi et al., "Zero Bubble Pipeline
Parallelism", 2023, arXiv:2401.10241, sections 2.3 and 6. What dualpipe_v holds, DeepSeek-AI, "DeepSeek-V3
Technical Report", 2024, arXiv:2412.19437, table 2, where PP is our 2p. The other cases and the exact limits
are our own, found and tested with `pipeline_parallel.analysis.simulate`.
"""


def makespan(
    schedule: str, ranks: int, microbatches: int, chunks: int, f: float, i: float, w: float
) -> float | None:
    """Return the seconds from the first action's start to the last one's end; None if there is no formula.

    f, i and w are the seconds of one rank for one microbatch, all its stages together. `chunks` is the number
    of stages of a rank, for `interleaved` alone.
    """
    waiting = idle(schedule, ranks, microbatches, chunks, f, i, w)
    return None if waiting is None else microbatches * (f + i + w) + waiting


def bubble(
    schedule: str, ranks: int, microbatches: int, chunks: int, f: float, i: float, w: float
) -> float | None:
    """Return the share of the makespan in which a rank is idle, from 0 to 1; arguments as for `makespan`."""
    seconds = makespan(schedule, ranks, microbatches, chunks, f, i, w)
    if seconds is None:
        return None
    return 1 - microbatches * (f + i + w) / seconds if seconds else 0.0


def idle(
    schedule: str, ranks: int, microbatches: int, chunks: int, f: float, i: float, w: float
) -> float | None:
    """Return the seconds in which a rank is idle, equal for all ranks; arguments are those of `makespan`."""
    p, m, v, b = ranks, microbatches, chunks, i + w
    equal = p == 1 or f == i == w
    has_zb_v = equal or (m >= 2 * p - 1 and f <= i and i / 2 <= w <= i)
    has_dualpipe_v = equal or (m >= 2 * p and w <= i and (p - 1) * i <= p * f and f <= i + w)
    missing = max(0, 2 * p - m - (m <= p))
    return {
        "naive": m * (p - 1) * (f + b),
        "gpipe": (p - 1) * (f + b),
        "1f1b": (p - 1) * (f + b),
        "interleaved": max(0, p - m) * (f + b) + (min(m, p) - 1) * (f + b) / v,
        "zb_h1": (p - 1) * (f + i) - (min(m, p) - 1) * min(f, i, w),
        "zb_v": max((p - 1) * i / 2, (2 * p - 1 - m) * f) if has_zb_v else None,
        "dualpipe_v": (p - 1) * (f + i - w) / 2 + missing * f if has_dualpipe_v else None,
    }[schedule]


def most_held(schedule: str, ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    """Return the most microbatches that the rank holds at a time, counted in each of its stages."""
    p, m, v = ranks, microbatches, chunks
    first_round = -(-m // max(1, m // p))
    return {
        "naive": 1,
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(m * v, (v - 1) * first_round + 2 * (p - 1 - rank) + 1),
        "zb_h1": min(m, p),
        "zb_v": min(2 * p, 2 * m, m + 1 + rank),
        "dualpipe_v": min(2 * p + 1, 2 * m, m + 1 + rank),
    }[schedule]
