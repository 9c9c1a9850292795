"""Add to a lesson's page what only the site has: a page to play with, puzzles, and what each step changes."""

import html

from front import frame
from lab.what_changed import Line, difference, steps_of
from puzzles.puzzles import PUZZLES

# The four ranks of lesson 8's runs at 200 Mbit/s.
AT_HOME = (
    "layers=8&width=160&heads=8&vocabulary=256&context=48&sequence=48&precision=float32&batch=6&microbatches=1"
    "&dataRanks=4&pipelineRanks=1&flops=1e11&rate=0.2&capacity=1e9&stage=0&machineRanks=2&innerRate=20"
)
# The page to play with of each lesson, with settings, and what can be done on it.
PLAYED = {
    "comm": ("all_reduce.html", "embed=yes&show=ring,tree", "All-reduce: messages in flight"),
    "zero": ("calculator.html", "embed=yes", "Memory and step time"),
    "pipeline_parallel": ("schedules.html", "embed=yes&show=gpipe,1f1b", "Pipeline schedules"),
    "context_parallel": ("context.html", "embed=yes", "Long sequences: ring attention"),
    "low_communication": ("calculator.html", f"embed=less&{AT_HOME}", "Memory and step time: sending less"),
}
PUZZLES_OF = {
    "data_parallel": ("data_parallel", "overlap"),
    "zero": ("zero1", "zero3"),
    "pipeline_parallel": ("pipeline", "one_f_one_b"),
    "hybrid_parallel": ("sharded_stages",),
}
WHAT_CHANGED = """

## What changed

These are the differences between the concepts of two files, without imports and the training loop. They show
solutions of exercises: write first.

"""
SIGNS = {"-": "del", "+": "ins", " ": "span"}


def with_additions(folder: str, text: str) -> str:
    """Return a lesson's page with what can be played after its route, and its steps at the end."""
    played = "\n".join([*player(folder), *puzzles(folder)])
    if played:
        parts = text.split("\n## ")
        parts.insert(min(2, len(parts)), f"Play with it\n\n{raw(played)}\n")
        text = "\n## ".join(parts)
    steps = steps_of(folder)
    if steps:
        text += WHAT_CHANGED + raw("\n".join(step(before, after) for before, after in steps))
    return text


def player(folder: str) -> list[str]:
    if folder not in PLAYED:
        return []
    name, settings, title = PLAYED[folder]
    full = f'<a href="../site/{name}">The full page</a> has all settings.'
    return [frame(f"../site/{name}#{settings}", title), f"<p>{full}</p>"]


def puzzles(folder: str) -> list[str]:
    titles = {puzzle["name"]: f"{i}. {puzzle['title']}" for i, puzzle in enumerate(PUZZLES, 1)}
    links = [
        f'<a href="../site/puzzles.html#puzzle={name}">{titles[name]}</a>'
        for name in PUZZLES_OF.get(folder, ())
    ]
    return [f"<p>Puzzles of this lesson: {', '.join(links)}.</p>"] if links else []


def step(before: str, after: str) -> str:
    """Return a step's difference, folded."""
    lines = "\n".join(line(each) for each in difference(before, after))
    command = f"make diff FROM={before} TO={after}"
    return (
        f'<details class="step"><summary>{before} → {after}</summary>'
        f"<p>In a terminal: <code>{command}</code></p><pre>{lines}</pre></details>"
    )


def line(each: Line) -> str:
    sign, text = each
    if sign in "@#":
        return f"<b>{html.escape(text)}</b>"
    name = SIGNS[sign]
    return f"<{name}>{html.escape(f'{sign} {text}'.rstrip())}</{name}>"


def raw(text: str) -> str:
    return f"```{{raw}} html\n{text}\n```\n"
