"""Make the report's figures out of recorded spans and counted messages, and print them.

hidden_share     the share of the communication time in which the rank also computed
blocking_share   the share of the communication time in which the main thread itself communicated: an
                 operation that blocks, as naive data parallel's and a row layer's forward, cannot be hidden
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from comm.clocks import gather_events
from comm.exchange import exchange, on_main
from comm.wire.streams import transports_of
from lab import units
from lab.check import module_digest, state_digest
from lab.cluster import Cluster
from lab.trace import timeline
from lab.trace.gantt import Event, draw
from lab.trace.ledger import Entry, Traffic
from lab.trace.overlap import overlap_of, per_step
from training import conclusion

WARMUP_STEPS = 2  # neither timed nor drawn
DRAWN_STEPS = 3  # in a picture; more would not make it clearer


def spans_of(windows: Sequence[tuple[int, int]]) -> list[list[Event]]:
    """Return this rank's spans in each step, from the starts and ends of the steps."""
    return per_step(timeline.recorded(), windows)


def overlap_figures(steps: Sequence[Sequence[Event]]) -> dict[str, float | None]:
    """Return the medians over `steps` of one rank's seconds and shares; None where there is nothing."""
    overlaps = [overlap_of(events) for events in steps]
    names = "compute_seconds", "communication_seconds", "hidden_share", "blocking_share"
    return {name: median([getattr(one, name) for one in overlaps]) for name in names}


def pattern_and_transport(traffic: Mapping[Entry, Traffic], pattern: str) -> dict[str, str]:
    """Return the names of the patterns and transports in `traffic`; without messages, those of `pattern`."""
    by_bytes = sorted(traffic.items(), key=lambda row: -row[1].bytes_sent)
    patterns = list(dict.fromkeys(entry.pattern for entry, sent in by_bytes if sent.messages_sent))
    used = [transports_of(one) for one in patterns]
    transports = dict.fromkeys(name for names in used for name in sorted(names))
    return {
        "pattern": ", ".join(patterns) or pattern,
        "transport": ", ".join(transports) or "none (one rank)",
    }


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def replica_digests(cluster: Cluster, module: nn.Module) -> list[str]:
    """Return every rank's digest of the full model, in rank order. All ranks must call it."""
    if not hasattr(module, "full_state_dict"):
        return exchange(module_digest(module))
    return exchange(state_digest(module.full_state_dict()))  # type: ignore[operator]


def draw_trace(
    cluster: Cluster, run_mode: str, folder: str, windows: Sequence[tuple[int, int]], as_json: bool
) -> None:
    """Write the files of --trace, from this rank's spans of some of the steps. All ranks must call it."""
    steps = spans_of(windows[WARMUP_STEPS : WARMUP_STEPS + DRAWN_STEPS] or windows)
    title = f"{run_mode}, {cluster.world_size} ranks"
    everyones = gather_events([event for events in steps for event in events])
    name = f"{run_mode}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    paths = Path(folder, f"{name}.json"), Path(folder, f"{name}.png")

    def write() -> None:
        parts = [path.with_name(f".{path.name}") for path in paths]  # a full disk must leave no cut file
        try:
            timeline.write_chrome_trace(parts[0], everyones)
            draw(everyones, parts[1], title)
            for part, path in zip(parts, paths, strict=True):
                part.replace(path)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)

    on_main(cluster, f"write the trace in {folder}", write)
    if cluster.is_main and not as_json:
        print(f"The trace is in {' and '.join(map(str, paths))}.")


def print_report(
    cluster: Cluster,
    figures: dict[str, Any],
    as_json: bool = False,
    verbose: bool = False,
    rows: Mapping[str, str] | None = None,
    meaning: str | None = None,
) -> None:
    """Print a run's report on rank 0: about ten rows and what they mean, or with `verbose` all figures.

    `rows` and `meaning` are those that only this script can give: texts by their names, and a sentence.
    With `as_json` print the figures as one line of JSON on stdout, and the report on stderr.
    """
    if not cluster.is_main:
        return
    console = Console(stderr=as_json)
    every_row = [(name, _readable(name, value)) for name, value in figures.items() if value is not None]
    ranks = f"{cluster.world_size} rank{'s' * (cluster.world_size > 1)}"
    title = f"{figures['run_mode']}, {ranks}, {figures['steps']} steps"
    table = Table(show_header=False, title=None if verbose else title, title_justify="left")
    for name, value in every_row if verbose else conclusion.rows(figures, rows or {}):
        table.add_row(name, Text(value))
    console.print(table)
    for sentence in conclusion.sentences(figures, meaning):
        console.print(Text(sentence), soft_wrap=True)
    if as_json:
        print(json.dumps(figures, allow_nan=False, default=str), flush=True)


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(_readable(name, item) for item in value)
    if name.endswith("_seconds_per_byte"):
        return f"{units.show_seconds(value)} ({units.show_rate(value)})"
    if name.endswith("_seconds"):
        return units.show_seconds(value)
    if "bytes" in name:
        return units.show_bytes(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)
