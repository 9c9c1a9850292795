"""Write one HTML file that plays schedules and compares them. It needs no server and no network.

    python pipeline_parallel/analysis/page.py --out schedules.html

The page shows timelines of simulate.py. For one microbatch, a rank's layers take one unit of time for the
forward, one for the gradient of the input and one for those of the weights. All schedules train the same
model: if a rank has n stages, each takes 1/n of these times and holds 1/n of the rank's activations. A link
opens the page with the settings that it names: schedules.html#ranks=4&microbatches=8&show=gpipe,1f1b&time=12
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from comm.cost import Link
from lab.launch.errors import reason
from lab.page import PLAYER, Page
from lab.trace.gantt import COLORS, Event, readable_on, shade
from pipeline_parallel.actions import (
    FORWARD,
    GANTT_KIND,
    WEIGHT_GRADIENT,
    as_dependency,
    dependencies,
    num_microbatches,
    placement,
)
from pipeline_parallel.analysis.simulate import Costs, Simulation, TimedAction, simulate
from pipeline_parallel.schedules import SCHEDULES, stages_per_rank, table_of

TITLES = {
    "naive": ("naive", "one microbatch at a time: one rank works, the others wait"),
    "gpipe": ("GPipe", "all forwards, then all backwards: every microbatch is held at once"),
    "1f1b": ("1F1B", "each backward as soon as possible: the same bubble, far fewer activations held"),
    "interleaved": ("interleaved 1F1B", "several small stages a rank: a smaller bubble, more held and sent"),
    "zb_h1": ("ZB-H1", "each backward in two halves: the weight gradients fill idle time"),
    "zb_v": (
        "ZB-V",
        "two stages on each rank, down and back up: almost no bubble where forward, input gradient and weight"
        " gradient take equally long",
    ),
    "dualpipe_v": (
        "DualPipeV",
        "the stages of ZB-V, with a forward and a backward of the two in pairs, which could overlap: one"
        " microbatch more held",
    ),
}
HERE = Path(__file__).parent
PAGE = Page(HERE / "page.html", [HERE / "page.css"], [PLAYER, HERE / "page.js", HERE / "page_words.js"])
# To choose from. A message between two ranks takes as long as half a forward, or no time.
RANKS, MICROBATCHES_PER_RANK, MESSAGES = (2, 4, 8), (1, 2, 4), (0.0, 0.5)
DIGITS = 9  # after the decimal point of seconds: exact sums, and a small file


def write_page(
    path: str | Path, measured: Mapping[str, Sequence[Event]] | None = None, root: str | None = None
) -> Path:
    """Write the page to `path`.

    `measured` holds the events of one step of all ranks by the name of their schedule. The page opens with
    them, each beside a simulation from its own costs. `root` is where it finds the site (lab/page).
    """
    sizes = [(ranks, ranks * times) for ranks in RANKS for times in MICROBATCHES_PER_RANK]
    runs = [run for message in MESSAGES for size in sizes for run in _simulated(*size, message)]
    opening: dict[str, Any] = {"ranks": 4, "microbatches": 8, "message": "0"}
    opening["show"] = ["gpipe", "1f1b", "zb_h1"]
    if real := [run for label, events in (measured or {}).items() for run in _measured(label, events)]:
        opening = {key: real[0][key] for key in ("ranks", "microbatches", "message")}
        opening["show"] = [run["name"] for run in real]
    rules = _colors(max(len(each) for run in runs + real for each in run["stages"]))
    return PAGE.write(path, rules, {"runs": runs + real, "open": opening}, root)


def simulation(name: str, ranks: int, microbatches: int, message: float) -> Simulation:
    """Return the simulation of a schedule that the page shows: the same model for any number of stages."""
    stages = stages_per_rank(name)
    costs = Costs.equal(ranks * stages, *[1 / stages] * 3)
    return simulate(table_of(name, ranks, microbatches), costs, Link(0.0, message), message_bytes=1)


def _simulated(ranks: int, microbatches: int, message: float) -> Iterator[dict[str, Any]]:
    for name in SCHEDULES:
        title, idea = TITLES[name]
        run = _packed(simulation(name, ranks, microbatches, message))
        yield {"name": name, "title": title, "idea": idea, "message": f"{message:g}", **run}


def _measured(label: str, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Yield a real run, and the simulation of its table with its own median costs."""
    run = Simulation.measured(events)
    again = simulate(run.table, Costs.measured(events, len(placement(run.table))))
    title, _ = TITLES.get(label, (label, ""))
    for what, timeline, idea in (
        ("measured", run, "what happened, in seconds"),
        ("simulated", again, "the same order, from the median costs of its stages"),
    ):
        names = {"name": f"{what} {label}", "title": f"{title}, {what}", "idea": idea}
        yield {**names, "message": "as measured", **_packed(timeline)}


def _packed(simulated: Simulation) -> dict[str, Any]:
    """Return what the page shows of a timeline. A cell is an action, its start and end, and what it needs."""
    table = simulated.table
    rank_of = placement(table)
    giver = {as_dependency(action): str(action) for row in table for action in row}
    forwards = [end - start for row in simulated.rows for action, start, end in row if action.kind == FORWARD]

    def cell(timed: TimedAction) -> list[Any]:
        needed = [giver[need] for need in dependencies(timed.action, max(rank_of))]
        return [str(timed.action), round(timed.start, DIGITS), round(timed.end, DIGITS), *needed]

    return {
        "ranks": len(table),
        "microbatches": num_microbatches(table),
        "stages": [[stage for stage, rank in rank_of.items() if rank == row] for row in range(len(table))],
        "makespan": round(simulated.makespan, DIGITS),
        "bubble": round(simulated.bubble, DIGITS),
        "peak": simulated.peak_held,
        "forward": sum(forwards) / (len(table) * num_microbatches(table)),  # sets the pace of playing
        "rows": [[cell(timed) for timed in row] for row in simulated.rows],
    }


def _colors(chunks: int) -> str:
    """Return style rules for each kind (F, B, I, W) in a rank's first stage (c0), its second and so on."""
    rules = []
    for chunk in range(max(2, chunks)):
        for kind, gantt_kind in GANTT_KIND.items():
            fill, band = (shade(COLORS[name], chunk) for name in (gantt_kind, GANTT_KIND[WEIGHT_GRADIENT]))
            ink = readable_on(fill)
            rules.append(f".{kind}.c{chunk} {{ --fill: {fill}; --band: {band}; --ink-on: {ink}; }}")
    return "\n".join(rules)


def main(out: Path = Path("schedules.html")) -> None:
    """Write a page that plays pipeline schedules to the file `out`."""
    try:
        size = write_page(out).stat().st_size
    except OSError as error:
        raise SystemExit(f"--out: {reason(error)}") from error
    print(f"{out}: {size / 1e6:.1f} MB, open it in any browser")


if __name__ == "__main__":
    tyro.cli(main)
