"""Draw the ring all-reduce of four ranks as an animated SVG, from the messages of comm/algorithms/ring.py.

python site/animation.py        writes docs/all_reduce.svg

Each rank begins with a tensor of its own colour, in four chunks. A chunk gets a rank's colour when
this rank's numbers come into its sum. Rank r's numbers are all 2 to the power of r, so a sum tells whose they
are.
"""

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from comm.algorithms import ring
from comm.shards import shards_of

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of Okabe and Ito
CORNERS = ((40, 60), (500, 60), (500, 250), (40, 250))  # of the ranks' boxes: clockwise, as the messages go
CELL, HEIGHT = 40, 18
STEP, PAUSE, END = 1.5, 0.5, 3.0  # seconds: a step, of which it rests, and the result
TOTAL = 2 * (RANKS - 1) * STEP + END
LOOP = f'dur="{TOTAL:g}s" repeatCount="indefinite"'
Chunks = list[int]  # the sum in each chunk of a rank


class Wire:
    """Connects ranks that are threads; notes for each send what the rank holds, and which chunk leaves."""

    def __init__(self, rank: int, tensor: torch.Tensor, links: list[queue.Queue]) -> None:
        self.rank, self.size, self.tensor, self.links = rank, RANKS, tensor, links
        self.sends: list[tuple[Chunks, int]] = []

    def isend(self, tensor: torch.Tensor, to: int) -> "Transfer":
        assert to == (self.rank + 1) % RANKS
        self.sends.append((chunks_of(self.tensor), tensor.storage_offset()))  # a chunk has one element
        self.links[to].put(tensor.clone())
        return Transfer()

    def irecv(self, tensor: torch.Tensor, source: int) -> "Transfer":
        return Transfer(tensor, self.links[self.rank])


class Transfer:
    """A message that has left, or one that will arrive in a tensor."""

    def __init__(self, tensor: torch.Tensor | None = None, link: queue.Queue | None = None) -> None:
        self.tensor, self.link = tensor, link

    def wait(self) -> None:
        if self.tensor is not None and self.link is not None:
            self.tensor.copy_(self.link.get(timeout=20))


def chunks_of(tensor: torch.Tensor) -> Chunks:
    return [int(chunk[0]) for chunk in shards_of(tensor, RANKS)]


def run() -> tuple[list[list[tuple[Chunks, int]]], list[Chunks]]:
    """Return what each rank holds before each step, and the chunk that leaves; then what it ends with."""
    links: list[queue.Queue] = [queue.Queue() for _ in range(RANKS)]
    wires = [Wire(rank, torch.full((RANKS,), 2.0**rank), links) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(lambda wire: ring.all_reduce(wire, wire.tensor, "sum"), wires))
    steps = [list(sends) for sends in zip(*(wire.sends for wire in wires), strict=True)]
    return steps, [chunks_of(wire.tensor) for wire in wires]


def svg() -> str:
    """Run the all-reduce, and return the picture."""
    steps, end = run()
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 385" font-family="sans-serif">',
        '<rect width="720" height="385" rx="8" fill="white"/>',
        *sentences(),
    ]
    for rank, (x, y) in enumerate(CORNERS):
        parts.append(
            f'<text x="{x}" y="{y + 14}" fill="{COLOURS[rank]}" font-weight="bold">rank {rank}</text>'
        )
        for chunk in range(RANKS):
            history = [sends[rank][0][chunk] for sends in steps] + [end[rank][chunk]]
            parts += cells(*place(rank, chunk), history)
    for step, sends in enumerate(steps):
        parts += [message(step, rank, chunk, held[chunk]) for rank, (held, chunk) in enumerate(sends)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def sentences() -> Iterator[str]:
    """Yield the sentence of each step, and that of the result, which stays where nothing is animated."""
    halves = (
        ("Reduce-scatter", "each rank adds what arrives"),
        ("All-gather", "each rank copies what arrives"),
    )
    said = [f"{half}, step {n} of {RANKS - 1}: {what}" for half, what in halves for n in range(1, RANKS)]
    for step, sentence in enumerate([*said, "Every rank has the sum"]):
        is_last = step == len(said)
        shown = during(step * STEP, TOTAL if is_last else (step + 1) * STEP)
        yield f'<text x="360" y="30" text-anchor="middle" opacity="{int(is_last)}">{sentence}{shown}</text>'


def cells(x: int, y: int, history: list[int]) -> Iterator[str]:
    """Yield the cells of a chunk, each with the moments at which a rank's numbers come into it."""
    yield f'<rect x="{x}" y="{y}" width="{RANKS * CELL}" height="{HEIGHT}" fill="#EEEEEE"/>'
    moments = [0.0, *(arrival(step) for step in range(len(history) - 1))]
    for who in range(RANKS):
        there = [held >> who & 1 for held in history]
        yield cell(x + who * CELL, y, who, "" if all(there) else opacity(there, moments))


def cell(x: int, y: int, who: int, animation: str = "") -> str:
    box = f'<rect x="{x}" y="{y}" width="{CELL}" height="{HEIGHT}" fill="{COLOURS[who]}"'
    return f"{box}>{animation}</rect>"


def message(step: int, rank: int, chunk: int, held: int) -> str:
    """Return a chunk that moves to the next rank, with the colours that are in its sum."""
    (x, y), (to_x, to_y) = place(rank, chunk), place((rank + 1) % RANKS, chunk)
    start, stop = step * STEP, arrival(step)
    times = f"0;{start / TOTAL:.4f};{stop / TOTAL:.4f};1"
    filled = "".join(cell(who * CELL, 0, who) for who in range(RANKS) if held >> who & 1)
    return (
        f'<g opacity="0"><rect width="{RANKS * CELL}" height="{HEIGHT}" fill="white" stroke="black" '
        f'stroke-width="4"/>{filled}<animateTransform attributeName="transform" type="translate" {LOOP} '
        f'keyTimes="{times}" values="{x} {y};{x} {y};{to_x} {to_y};{to_x} {to_y}"/>{during(start, stop)}</g>'
    )


def place(rank: int, chunk: int) -> tuple[int, int]:
    """Return where a chunk of a rank is."""
    x, y = CORNERS[rank]
    return x, y + 26 + chunk * (HEIGHT + 4)


def arrival(step: int) -> float:
    return (step + 1) * STEP - PAUSE


def during(start: float, stop: float) -> str:
    """Return an animation that shows an element from one second of the loop to another one."""
    before, after = ([(0, 0.0)] if start else []), ([(0, stop)] if stop < TOTAL else [])
    values, moments = zip(*before, (1, start), *after, strict=True)
    return opacity(values, moments)


def opacity(values: Sequence[int], moments: Sequence[float]) -> str:
    """Return an animation that shows (1) or hides (0) an element from each of the moments on."""
    shown, times = ";".join(map(str, values)), ";".join(f"{moment / TOTAL:.4f}" for moment in moments)
    return (
        f'<animate attributeName="opacity" {LOOP} calcMode="discrete" values="{shown}" keyTimes="{times}"/>'
    )


if __name__ == "__main__":
    (ROOT / "docs" / "all_reduce.svg").write_text(svg(), "utf-8")
