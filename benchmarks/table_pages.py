"""Write the results of benchmarks/table.py into two pages, between two marks, and draw them as bars.

Everything on the pages comes from the stored results, so they can be written again without measuring. Colours
are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which differ for colour-blind eyes too.
"""

import hashlib
import json
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab import units
from lab.launch.errors import WorkbookError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "table.json"
SHORT, FULL = ROOT / "docs" / "results.md", ROOT / "benchmarks" / "README.md"
LINK_NAMES = {"loopback": "loopback", "1gbit": "1 Gbit/s"}
PICTURES = {  # for each picture its panels: title, link, figure of a row, unit and its name
    "tokens_per_second.svg": [
        ("loopback", "loopback", "tokens_per_second", 1, "tokens per second"),
        ("1 Gbit/s", "1gbit", "tokens_per_second", 1, "tokens per second"),
    ],
    "memory.svg": [
        ("memory of a rank", "1gbit", "memory_bytes", 1e6, "MB"),
        ("sent by a rank in a step", "1gbit", "bytes_per_step", 1e6, "MB"),
    ],
}
_MARKED = re.compile(r"(?<=<!-- table: begin -->\n).*?(?=<!-- table: end -->)", re.DOTALL)
_COLORS, _HATCHES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), ("", "///", "...", "xx")
Row = dict[str, Any]
Results = dict[str, Any]


def write(results: Results) -> None:
    """Write the pages' texts between their marks, and draw the pictures."""
    for path, section in pages(results).items():
        text = path.read_text("utf-8")
        start, end = marked(text)
        path.write_text(text[:start] + section + text[end:], "utf-8")
    draw(results, RESULTS.parent)


def marked(text: str) -> tuple[int, int]:
    """Return where the text between the marks is. Raise WorkbookError unless there is one pair of them."""
    found = list(_MARKED.finditer(text))
    if len(found) != 1:
        raise WorkbookError(
            "The page must have the marks <!-- table: begin --> and <!-- table: end --> once."
        )
    return found[0].span()


def pages(results: Results) -> dict[Path, str]:
    """Return the text between the marks of each page."""
    return {SHORT: short_page(results), FULL: full_page(results)}


def short_page(results: Results) -> str:
    """Return the section of docs/results.md: tokens per second, and the memory of a rank."""
    rows, most = results["rows"], max(row["world_size"] for row in results["rows"])
    cells = _cells(rows)
    columns = sorted((place for place in cells if place[0] > 1), key=lambda place: (place[1], place[0]))
    header = ["technique", *(f"{LINK_NAMES[link]}, {number} workers" for number, link in columns)]
    header += [f"memory of a rank, {most} workers", f"bytes sent in a step, {most} workers"]
    lines = []
    for what in [name for name in _names(rows) if name != "vanilla"]:
        found = [cells[place].get(what) for place in columns]
        largest = next(cells[place][what] for place in columns if what in cells[place] and place[0] == most)
        speeds = ["-" if row is None else "{} ({})".format(*figures(row)[:2]) for row in found]
        lines.append([what, *speeds, *figures(largest)[3:]])
    tokens, _, _, memory, _ = figures(cells[1, "loopback"]["vanilla"])
    meaning = (
        "A cell has the tokens per second and, in parentheses, the speed-up over one process. That process, "
        f"`vanilla`, trains {tokens} tokens per second and takes {memory}."
    )
    cores = results["machine"]["cores"]
    where = (
        f"{most} workers have {cores} cores here, so no speed-up above {min(cores, most)} can show. "
        "[benchmarks/README.md](../benchmarks/README.md) has all figures, and says what else does not show."
    )
    name = "tokens_per_second.svg"
    parts = [*_setting(results), _paragraph(meaning), *_other_model(rows), _table(header, lines)]
    parts += [_paragraph(where), f"![{_alternative(rows, name)}](../benchmarks/results/{name})"]
    return "\n\n".join(parts) + "\n"


def full_page(results: Results) -> str:
    """Return the section of benchmarks/README.md: all figures, the limits, the commands, the pictures."""
    rows, parts = results["rows"], [*_setting(results), *_other_model(results["rows"])]
    header = ["technique", "samples/s", "tokens/s", "speed-up", "step", "memory of a rank", "sent in a step"]
    for (number, link), found in _cells(rows).items():
        parts.append(f"### {_place(number, link)}")
        body = []
        for what in [name for name in _names(rows) if name in found or name != "vanilla"]:
            if (row := found.get(what)) is None:  # it has no meaning there
                body.append([what] + ["-"] * (len(header) - 1))
            else:
                samples = _mean(row, "tokens_per_second") / results["setting"]["block_size"]
                body.append([what, f"{samples:,.1f}", *figures(row)])
        parts.append(_table(header, body))
    limits = limits_of(max(row["world_size"] for row in rows), results["machine"]["cores"])
    parts += ["### What this machine cannot show", "\n".join(limits) or "It shows everything."]
    parts += _plans(rows)
    parts.append("### Pictures")
    parts += [f"![{_alternative(rows, name)}](results/{name})" for name in PICTURES]
    parts.append("### The command of each row")
    parts.append(
        "These are the runs with most workers and the slow link. Without `--link` they run on loopback."
    )
    commands = {row["what"]: f"{row['command']}   # {row['what']}" for row in rows}  # that of the last row
    parts.append("```bash\n" + "\n".join(commands.values()) + "\n```")
    return "\n\n".join(parts) + "\n"


def figures(row: Row) -> list[str]:
    """Return a row's tokens per second, speed-up, step time, memory of a rank, and bytes sent in a step."""
    runs = row["runs"]["tokens_per_second"]
    deviation = f" ± {_deviation(runs):,.0f}" if len(runs) > 1 else ""
    return [
        f"{statistics.mean(runs):,.0f}{deviation}",
        f"{row['ratio']:.2f}" + "*" * (not is_against_vanilla(row)),
        units.show_seconds(_mean(row, "step_seconds")),
        units.show_bytes(_mean(row, "memory_bytes")),
        units.show_bytes(_mean(row, "bytes_per_step")) if row["world_size"] > 1 else "-",
    ]


def is_against_vanilla(row: Row) -> bool:
    """Return whether the row's speed-up is over vanilla."""
    return row["against"] == "vanilla"


def limits_of(workers: int, cores: int) -> list[str]:
    """Return what a machine with so many cores cannot show with so many workers."""
    limits = []
    if workers >= cores:
        limits.append(
            "- On loopback the cores that compute also move the messages, so it does not help much to hide "
            "communication behind computing. At 1 Gbit/s it does: there a worker sleeps until the simulated "
            "link is done, and its core is free."
        )
    if workers > cores:
        limits.append(
            f"- {workers} workers share {cores} cores, so a speed-up cannot be larger than {cores}. On "
            f"{workers} machines it can."
        )
        limits.append(
            "- While a worker waits in a pipeline's bubble, another one uses its core. With more stages than "
            "cores the bubbles therefore cost little, and the schedules hardly differ."
        )
    return limits


def _setting(results: Results) -> list[str]:
    """Return what is trained, how it is measured, and on which machine."""
    setting, machine = results["setting"], results["machine"]
    training = (
        f"A GPT of {setting['parameters'] / 1e6:.1f} million parameters (`--size {setting['size']}`) is "
        f"trained with AdamW on a global batch of {setting['batch_size']} x {setting['block_size']} tokens, "
        "which is the same for any number of workers. A worker computes with one thread. The figures are "
        f"mean and standard deviation over {setting['runs']} runs of {setting['timed_steps']} timed steps; "
        "all rows take turns."
    )
    where = (
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB of memory, "
        f"{machine['system']}, Python {machine['python']}, torch {machine['torch']}, {machine['date']}. "
        f"Its load before the start was {machine['load']:.1f}."
    )
    return [_paragraph(training), _paragraph(where)]


def _other_model(rows: Sequence[Row]) -> list[str]:
    """Return a paragraph on the rows that are not compared with vanilla, if there are any."""
    others = [row for row in rows if not is_against_vanilla(row)]
    return [
        _paragraph(
            f"An asterisk marks a speed-up over another run: `{one['what']}` trains another model, in which "
            "8 experts take the place of the MLP in each block, and a token passes 2 of them. Its tokens per "
            "second and its memory cannot be compared with those of the other rows. Its speed-up is over its "
            f"own run with 1 worker, which trains {one['theirs']:,.0f} tokens per second."
        )
        for one in others[:1]
    ]


def _plans(rows: Sequence[Row]) -> list[str]:
    """Return a list of what the planner has chosen in each row, the most frequent plan first."""
    lines = []
    for row in [row for row in rows if row["plans"]]:
        runs = len(row["plans"])
        plans = [f"{plan} ({count} of {runs} runs)" for plan, count in Counter(row["plans"]).most_common()]
        lines.append(f"- {_place(row['world_size'], row['link'])}: {', '.join(plans)}")
    return ["### What the planner has chosen", "\n".join(lines)] if lines else []


def _alternative(rows: Sequence[Row], picture: str) -> str:
    """Return the text that stands for a picture."""
    if picture == "memory.svg":
        return "Memory of a rank, and bytes that a rank sends in a step, for each technique"
    best = max(filter(is_against_vanilla, rows), key=lambda row: row["ratio"])
    place = _place(best["world_size"], best["link"])
    fastest = f"{best['what']} ({place}), {best['ratio']:.2f} times as fast as vanilla"
    return f"Tokens per second for each technique; the fastest is {fastest}"


def _cells(rows: Sequence[Row]) -> dict[tuple[int, str], dict[str, Row]]:
    """Return the rows by number of workers and link, then by technique."""
    places = sorted({(row["world_size"], row["link"]) for row in rows})
    return {p: {row["what"]: row for row in rows if (row["world_size"], row["link"]) == p} for p in places}


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["what"] for row in rows))


def _place(number: int, link: str) -> str:
    return "1 worker" if number == 1 else f"{number} workers, {LINK_NAMES[link]}"


def _mean(row: Row, name: str) -> float:
    return statistics.mean(row["runs"][name])


def _deviation(runs: Sequence[float]) -> float:
    return statistics.stdev(runs) if len(runs) > 1 else 0.0


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def digest(results: Results) -> str:
    """Return a short name of the results. Each picture has it in its metadata."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def draw(results: Results, folder: Path) -> None:
    """Write the pictures as SVG, the same bytes for the same results and version of matplotlib."""
    metadata = {"Date": None, "Description": f"drawn by benchmarks/table.py from results {digest(results)}"}
    with matplotlib.rc_context({"svg.hashsalt": "table", "font.size": 9}):
        for name, panels in PICTURES.items():
            figure = Figure(figsize=(9.2, 5.6), layout="constrained", facecolor="white")
            places = figure.subplots(1, len(panels), sharey=True)
            for (title, link, what, unit, label), axes in zip(panels, places, strict=True):
                _bars(axes, results["rows"], link, what, unit)
                axes.set(title=title, xlabel=label)
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
            figure.savefig(folder / name, metadata=metadata)


def _bars(axes: Axes, rows: list[Row], link: str, what: str, unit: float) -> None:
    """Draw a bar for each technique and number of workers, and a line for one process."""
    shown = [row for row in rows if row["link"] == link and row["world_size"] > 1]
    numbers, names = sorted({row["world_size"] for row in shown}), _names(shown)
    height = 0.8 / len(numbers)
    for i, number in enumerate(numbers):
        found = {
            row["what"]: [v / unit for v in row["runs"][what]] for row in shown if row["world_size"] == number
        }
        places = [names.index(name) + (i - (len(numbers) - 1) / 2) * height for name in found]
        means = [statistics.mean(runs) for runs in found.values()]
        deviations = [_deviation(runs) for runs in found.values()]
        style = {"color": _COLORS[i], "hatch": _HATCHES[i], "edgecolor": "white", "ecolor": "black"}
        axes.barh(places, means, height, xerr=deviations, label=f"{number} workers", **style)
    [vanilla] = [row for row in rows if row["what"] == "vanilla"]
    line = _mean(vanilla, what) / unit
    axes.axvline(line, color="black", linestyle="--", label="vanilla, one process")
    for row in rows:  # another model, so the line of vanilla says nothing about its bars
        if not is_against_vanilla(row) and row["world_size"] == 1:
            line, place = _mean(row, what) / unit, names.index(row["what"])
            label = f"{row['what']}, one process"
            axes.vlines(line, place - 0.5, place + 0.5, color="black", linewidth=2, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
