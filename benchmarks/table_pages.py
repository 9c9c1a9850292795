"""Write the results of benchmarks/table.py into READMEs, between two marks, as tables and pictures.

Everything on the pages comes from the stored results, so they can be written again without measuring.
"""

import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import units
from lab.launch.errors import WorkbookError

ROOT = Path(__file__).resolve().parent.parent
TOP, FULL = ROOT / "README.md", ROOT / "benchmarks" / "README.md"
PICTURES = ("tokens_per_second.svg", "memory.svg")
_MARKED = re.compile(r"(?<=<!-- table: begin -->\n).*?(?=<!-- table: end -->)", re.DOTALL)
_NOT_YET = "Nothing is measured yet: `.venv/bin/python benchmarks/table.py` writes this section.\n"
LINK_NAMES = {"loopback": "loopback", "1gbit": "1 Gbit/s"}
Row = dict[str, Any]


def marked(text: str) -> tuple[str, str, str]:
    """Return the page before, between and after the marks. Raise WorkbookError unless there is one pair."""
    found = list(_MARKED.finditer(text))
    if len(found) != 1:
        raise WorkbookError(
            "The page must have the marks <!-- table: begin --> and <!-- table: end --> once."
        )
    start, end = found[0].span()
    return text[:start], text[start:end], text[end:]


def pages(results: dict[str, Any] | None) -> dict[Path, str]:
    """Return the text between the marks of each page; None means that nothing is measured yet."""
    if results is None:
        return {TOP: _NOT_YET, FULL: _NOT_YET}
    return {TOP: short_page(results), FULL: full_page(results)}


def write_pages(results: dict[str, Any] | None) -> None:
    """Write the pages' texts between their marks."""
    for path, section in pages(results).items():
        before, _, after = marked(path.read_text())
        path.write_text(before + section + after)


def stale_pages(results: dict[str, Any] | None) -> list[Path]:
    """Return the pages that say something else than the results."""
    return [path for path, section in pages(results).items() if marked(path.read_text())[1] != section]


def short_page(results: dict[str, Any]) -> str:
    """Return the section of the top README: tokens per second, and the memory of a rank."""
    rows, most = results["rows"], max(row["world_size"] for row in results["rows"])
    cells = _cells(rows)
    columns = sorted((place for place in cells if place[0] > 1), key=lambda place: (place[1], place[0]))
    header = ["technique", *(f"{LINK_NAMES[link]}, {number} workers" for number, link in columns)]
    header += [f"memory of a rank, {most} workers", f"bytes sent in a step, {most} workers"]
    lines = []
    for what in [name for name in _names(rows) if name != "vanilla"]:
        found = [cells[place].get(what) for place in columns]
        largest = next(cells[place][what] for place in columns if what in cells[place] and place[0] == most)
        lines.append([what, *map(_speed, found), _mean_bytes(largest), _sent(largest)])
    [vanilla] = [row for row in rows if row["what"] == "vanilla"]
    meaning = (
        "A cell has the tokens per second and, in parentheses, the speed-up over one process. That process, "
        f"`vanilla`, trains {_tokens(vanilla)} tokens per second and takes {_mean_bytes(vanilla)}."
    )
    picture = f"![{_alternative(results, PICTURES[0])}](benchmarks/results/{PICTURES[0]})"
    parts = [
        _setting(results),
        _paragraph(meaning),
        *_other_model(results),
        _table(header, lines),
        _limits_in_short(results),
        picture,
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def full_page(results: dict[str, Any]) -> str:
    """Return the section of benchmarks/README.md: all figures, the notes, the commands, the pictures."""
    rows, parts = results["rows"], [_setting(results), *_other_model(results)]
    letters = {limit: chr(ord("a") + i) for i, limit in enumerate(_all_limits(results))}
    header = ["technique", "samples/s", "tokens/s", "speed-up", "step", "memory of a rank", "sent in a step"]
    for (number, link), found in _cells(rows).items():
        parts.append(f"### {_place(number, link)}")
        body = []
        for what in [name for name in _names(rows) if name in found or name != "vanilla"]:
            if (row := found.get(what)) is None:  # it has no meaning there
                body.append([what] + ["-"] * (len(header) - 1))
                continue
            notes = sorted(letters[limit] for limit in limits(row, results["machine"]["cores"]))
            tokens, speed_up, *others = figures(row)
            speed_up += f" ({', '.join(notes)})" if notes else ""
            samples = _mean(row, "tokens_per_second") / results["setting"]["block_size"]
            body.append([what, f"{samples:,.1f}", tokens, speed_up, *others])
        parts.append(_table(header, body).rstrip())
    parts.append("### What this machine cannot show")
    parts.append("\n".join(f"- ({letters[limit]}) {limit}" for limit in letters) or "It shows everything.")
    parts += _plans(rows)
    parts.append("### Pictures")
    parts += [f"![{_alternative(results, name)}](results/{name})" for name in PICTURES]
    parts.append("### The command of each row")
    parts.append(
        "These are the runs with most workers and the slow link. Without `--link` they run on loopback."
    )
    parts.append("```bash\n" + "\n".join(_commands(rows)) + "\n```")
    return "\n\n".join(parts) + "\n"


def figures(row: Row) -> list[str]:
    """Return a row's tokens per second, speed-up, step time, memory of a rank, and bytes sent in a step."""
    step = units.show_seconds(_mean(row, "step_seconds"))
    return [_tokens(row), _speed_up(row), step, _mean_bytes(row), _sent(row)]


def limits(row: Row, cores: int) -> list[str]:
    """Return what a machine with so many cores cannot show in this row."""
    number, found = row["world_size"], []
    if number > cores:
        found.append(
            f"{number} workers share {cores} cores, so a speed-up cannot be larger than {cores}. On {number} "
            "machines it can."
        )
    if number > cores and row["run_mode"].startswith("pipeline_"):
        found.append(
            f"While a worker waits in a pipeline's bubble, another one uses its core. With {number} stages "
            f"on {cores} cores the bubbles therefore cost little, and the schedules hardly differ."
        )
    if row["link"] == "loopback" and number > 1 and number >= cores:
        found.append(
            "On loopback the cores that compute also move the messages, so it does not help much to hide "
            "communication behind computing. At 1 Gbit/s it does: there a worker sleeps until the simulated "
            "link is done, and its core is free."
        )
    return found


def _all_limits(results: dict[str, Any]) -> list[str]:
    cores = results["machine"]["cores"]
    return list(dict.fromkeys(limit for row in results["rows"] for limit in limits(row, cores)))


def _limits_in_short(results: dict[str, Any]) -> str:
    cores = results["machine"]["cores"]
    too_many = sorted({row["world_size"] for row in results["rows"] if row["world_size"] > cores})
    if not too_many:
        return "Every worker had a core of its own."
    return _paragraph(
        f"{' or '.join(map(str, too_many))} workers share the {cores} cores of this machine, so no speed-up "
        f"above {cores} can show there. [benchmarks/README.md](benchmarks/README.md) has all figures, and "
        "says what else this machine cannot show."
    )


def _setting(results: dict[str, Any]) -> str:
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
    loaded = "**Other programs ran at the same time, so the times are too long.**"
    return "\n\n".join(map(_paragraph, [training, where] + [loaded] * is_loaded(machine)))


def _other_model(results: dict[str, Any]) -> list[str]:
    """Return a paragraph on the rows that are not compared with vanilla, if there are any."""
    others = [row for row in results["rows"] if not is_against_vanilla(row)]
    if not others:
        return []
    experts, one = results["setting"]["experts"], others[0]
    return [
        _paragraph(
            f"An asterisk marks a speed-up over another run: `{one['what']}` trains another model. "
            f"{experts['number']} experts take the place of the MLP in each block, and a token passes "
            f"{experts['top_k']} of them. So the model has {experts['parameters'] / 1e6:.1f} million "
            "parameters, and a token costs more. Its tokens per second and its memory cannot be compared "
            f"with those of the other rows. Its speed-up is over its own run with 1 worker, which trains "
            f"{one['theirs']:,.0f} tokens per second."
        )
    ]


def is_against_vanilla(row: Row) -> bool:
    """Return whether the row's speed-up is over vanilla."""
    return row["against"] == "vanilla"


def is_loaded(machine: dict[str, Any]) -> bool:
    """Return whether other programs ran on the machine when the measurement began."""
    return machine["load"] > 0.5


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _plans(rows: Sequence[Row]) -> list[str]:
    """Return a list of what the planner has chosen in each row, the most frequent plan first."""
    lines = []
    for row in [row for row in rows if row["plans"]]:
        runs = len(row["plans"])
        plans = [f"{plan} ({count} of {runs} runs)" for plan, count in Counter(row["plans"]).most_common()]
        lines.append(f"- {_place(row['world_size'], row['link'])}: {', '.join(plans)}")
    return ["### What the planner has chosen", "\n".join(lines)] if lines else []


def _commands(rows: Sequence[Row]) -> list[str]:
    """Return one command for each technique: that of its last row."""
    return list({row["what"]: f"{row['command']}   # {row['what']}" for row in rows}.values())


def _cells(rows: Sequence[Row]) -> dict[tuple[int, str], dict[str, Row]]:
    """Return the rows by number of workers and link, then by technique."""
    places = sorted({(row["world_size"], row["link"]) for row in rows})
    return {p: {row["what"]: row for row in rows if (row["world_size"], row["link"]) == p} for p in places}


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["what"] for row in rows))


def _place(number: int, link: str) -> str:
    return "1 worker" if number == 1 else f"{number} workers, {LINK_NAMES[link]}"


def _speed(row: Row | None) -> str:
    return "-" if row is None else f"{_tokens(row)} ({_speed_up(row)})"


def _speed_up(row: Row) -> str:
    return f"{row['ratio']:.2f}" + "*" * (not is_against_vanilla(row))


def _tokens(row: Row) -> str:
    runs = row["runs"]["tokens_per_second"]
    deviation = f" ± {statistics.stdev(runs):,.0f}" if len(runs) > 1 else ""
    return f"{statistics.mean(runs):,.0f}{deviation}"


def _mean(row: Row, name: str) -> float:
    return statistics.mean(row["runs"][name])


def _mean_bytes(row: Row) -> str:
    return units.show_bytes(_mean(row, "memory_bytes"))


def _sent(row: Row) -> str:
    return units.show_bytes(_mean(row, "bytes_per_step")) if row["world_size"] > 1 else "-"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def _alternative(results: dict[str, Any], picture: str) -> str:
    """Return the text that stands for a picture."""
    if picture == "memory.svg":
        return "Memory of a rank, and bytes that a rank sends in a step, for each technique"
    best = max(filter(is_against_vanilla, results["rows"]), key=lambda row: row["ratio"])
    place = _place(best["world_size"], best["link"])
    fastest = f"{best['what']} ({place}), {best['ratio']:.2f} times as fast as vanilla"
    return f"Tokens per second for each technique; the fastest is {fastest}"
