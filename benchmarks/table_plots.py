"""Draw the results of benchmarks/table.py as bars: tokens per second, and the memory and bytes of a rank.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which differ for colour-blind eyes too.
The background is white, so that the pictures can be read on dark pages.
"""

import hashlib
import json
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.table_pages import LINK_NAMES, is_against_vanilla

Row = dict[str, Any]
_COLORS, _HATCHES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), ("", "///", "...", "xx")


class Panel(NamedTuple):
    """Describes the bars of one panel: a figure of the rows with one link, in `unit`s."""

    title: str
    link: str
    figure: str
    label: str
    unit: float = 1.0


def pictures(results: dict[str, Any]) -> dict[str, list[Panel]]:
    """Return the panels of each picture."""
    links = {row["link"] for row in results["rows"] if row["world_size"] > 1}
    tokens = ("tokens_per_second", "tokens per second")
    speeds = [Panel(LINK_NAMES[link], link, *tokens) for link in LINK_NAMES if link in links]
    slow = "1gbit" if "1gbit" in links else "loopback"
    memory = Panel("memory of a rank", slow, "memory_bytes", "MB", 1e6)
    return {
        "tokens_per_second.svg": speeds,
        "memory.svg": [memory, Panel("sent by a rank in a step", slow, "bytes_per_step", "MB", 1e6)],
    }


def digest(results: dict[str, Any]) -> str:
    """Return a short name of the results. Each picture has it in its metadata."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def drawn_from(path: Path) -> str | None:
    """Return the digest of the results that a picture was drawn from."""
    found = re.search(r"results ([0-9a-f]{16})", path.read_text()) if path.exists() else None
    return found and found[1]


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write the pictures as SVG, the same bytes for the same results and version of matplotlib."""
    metadata = {"Date": None, "Description": f"drawn by benchmarks/table.py from results {digest(results)}"}
    with matplotlib.rc_context({"svg.hashsalt": "table", "font.size": 9}):
        for name, panels in pictures(results).items():
            figure = Figure(figsize=(4.2 * len(panels) + 0.8, 5.6), layout="constrained", facecolor="white")
            places = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
            for panel, axes in zip(panels, places, strict=True):
                _bars(axes, panel, results["rows"])
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
            figure.savefig(folder / name, metadata=metadata)


def _bars(axes: Axes, panel: Panel, rows: list[Row]) -> None:
    """Draw a bar for each technique and number of workers, and lines for one process."""
    [vanilla] = [row for row in rows if row["what"] == "vanilla"]
    alone = [row for row in rows if not is_against_vanilla(row) and row["world_size"] == 1]
    rows = [row for row in rows if row["link"] == panel.link and row["world_size"] > 1]
    numbers = sorted({row["world_size"] for row in rows})
    names = list(dict.fromkeys(row["what"] for row in rows))
    height = 0.8 / len(numbers)
    for i, number in enumerate(numbers):
        found = {row["what"]: _mean_and_deviation(row, panel) for row in rows if row["world_size"] == number}
        places = [names.index(name) + (i - (len(numbers) - 1) / 2) * height for name in found]
        means, deviations = zip(*found.values(), strict=True)
        style = {"color": _COLORS[i], "hatch": _HATCHES[i], "edgecolor": "white", "ecolor": "black"}
        axes.barh(places, means, height, xerr=deviations, label=f"{number} workers", **style)
    line = _mean_and_deviation(vanilla, panel)[0]
    axes.axvline(line, color="black", linestyle="--", label="vanilla, one process")
    for row in alone:  # another model, so the line of vanilla says nothing about its bars
        line, place = _mean_and_deviation(row, panel)[0], names.index(row["what"])
        label = f"{row['what']}, one process"
        axes.vlines(line, place - 0.5, place + 0.5, color="black", linewidth=2, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.label)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _mean_and_deviation(row: Row, panel: Panel) -> tuple[float, float]:
    runs = [value / panel.unit for value in row["runs"][panel.figure]]
    return statistics.mean(runs), statistics.stdev(runs) if len(runs) > 1 else 0.0
