"""Draw events as a Gantt chart with a row for each rank.

    draw([Event("F0", "forward", 0, 2_000_000), Event("B0", "backward", 2_000_000, 4_000_000)], "1f1b.svg")
    draw_panels({"measured": events, "simulated": others}, "both.svg")    # one above the other

Events may come from a recording (`lab.trace.timeline`) or from a simulator.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAIN_LANE = "main"

# Okabe and Ito's palette, for every kind of colour vision: https://jfly.uni-koeln.de/color/
COLORS = {
    "compute": "#0072B2",
    "forward": "#56B4E9",
    "backward": "#009E73",
    "weight": "#F0E442",
    "optimizer": "#CC79A7",
    "communication": "#D55E00",
    "data": "#E69F00",
    "wait": "#BDBDBD",
    "launch": "#000000",
}
OTHER_COLORS = ("#332288", "#882255", "#DDCC77", "#117733", "#AA4499", "#661100")  # Paul Tol's muted scheme

# In inches, so that bars and labels have the same size for any number of ranks.
MAIN_HEIGHT, LANE_HEIGHT, TRACK_GAP, RANK_GAP, NAME_HEIGHT = 0.30, 0.16, 0.03, 0.16, 0.26
MARGIN = 1.2  # at the sides, for the names of the lanes
FONT_POINTS = {MAIN_HEIGHT: 8.0, LANE_HEIGHT: 6.5}
LETTER = 0.62  # of the font's size, the width of a letter


class Event(NamedTuple):
    """Describe a named span of time. `lane` is "main", a thread's name or another; `args` fits into JSON."""

    name: str
    kind: str
    start_ns: int
    duration_ns: int
    lane: str = MAIN_LANE
    args: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default, never written to
    rank: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


def lanes(events: Iterable[Event]) -> dict[int, dict[str, list[Event]]]:
    """Return events by rank and lane: ranks in order, and the main lane of each before the others."""
    table: dict[int, dict[str, list[Event]]] = {}
    for event in sorted(events, key=lambda event: (event.rank, event.lane != MAIN_LANE, event.lane)):
        table.setdefault(event.rank, {}).setdefault(event.lane, []).append(event)
    return table


def tracks(events: Iterable[Event], nest: bool) -> list[list[Event]]:
    """Split a lane into tracks whose events do not overlap or, with `nest`, lie within one another."""
    rows: list[tuple[list[Event], list[int]]] = []  # a track, and the ends of its open events, innermost last
    for event in sorted(events, key=lambda event: (event.start_ns, -event.duration_ns)):
        for row in rows:
            ends = row[1]
            while ends and ends[-1] <= event.start_ns:
                ends.pop()
            if not ends or (nest and event.end_ns <= ends[-1]):
                break
        else:
            rows.append(row := ([], []))
        row[0].append(event)
        row[1].append(event.end_ns)
    return [track for track, _ in rows]


def draw(events: Iterable[Event], path: str | Path, title: str | None = None) -> Path:
    """Write a PNG or SVG (by suffix): a row for each rank, time in ms from the first event.

    Other lanes are thinner bars below the main lane. Events of a lane that overlap are below each other.
    """
    return draw_panels({"": events}, path, title)


def draw_panels(
    panels: Mapping[str, Iterable[Event]], path: str | Path, title: str | None = None, width: float = 11.0
) -> Path:
    """Draw sets of events, by name, one above the other. Those with an `args["chunk"]` above 0 are darker."""
    # Imported here, because it takes half a second. No pyplot: it keeps figures in a global list.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from_zero = {name: _from_zero(events) for name, events in panels.items()}
    everything = [event for events in from_zero.values() for event in events]
    last_ms = max(event.end_ns for event in everything) / 1e6 or 1.0
    palette = _palette([event.kind for event in everything])
    figure = Figure(dpi=150, layout="constrained")
    axes = figure.add_subplot(xlim=(0, last_ms), xlabel="time (ms)")

    ticks: dict[float, str] = {}
    y = RANK_GAP / 2
    for name, events in from_zero.items():
        if name:
            middle = y + NAME_HEIGHT / 2 - TRACK_GAP
            axes.text(0, middle, name, size=9, weight="bold", va="center", parse_math=False)
            y += NAME_HEIGHT
        for rank, by_lane in lanes(events).items():
            top = y
            for lane, spans in by_lane.items():
                height = MAIN_HEIGHT if lane == MAIN_LANE else LANE_HEIGHT
                ticks[y + height / 2] = f"rank {rank}" if y == top else lane
                for track in tracks(spans, nest=False):
                    _draw_bars(axes, track, y, height, palette, 72 * (width - MARGIN) / last_ms)
                    y += height + TRACK_GAP
            axes.axhspan(top - TRACK_GAP, y, color="#F3F3F3", zorder=0)
            y += RANK_GAP
    axes.set_ylim(y - RANK_GAP / 2, 0)
    figure.set_size_inches(width, y + (1.2 if title else 0.9))

    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    legend = [Patch(color=color, label=kind) for kind, color in palette.items()]
    if most := max(event.args.get("chunk", 0) for event in everything):
        legend.append(Patch(color=shade("#BBBBBB", most), label="darker: a later chunk of the rank"))
    figure.legend(
        handles=legend, loc="outside lower center", ncols=8, frameon=False, fontsize=8, handlelength=1.2
    )
    figure.savefig(path)
    return Path(path)


def _draw_bars(
    axes: Any, track: list[Event], top: float, height: float, palette: dict[str, str], points_per_ms: float
) -> None:
    # Short events last: their edges make them wider than their durations, and no other bar may cover them.
    track = sorted(track, key=lambda event: -event.duration_ns)
    fills = [shade(palette[event.kind], event.args.get("chunk", 0)) for event in track]
    spans = [(event.start_ns / 1e6, event.duration_ns / 1e6) for event in track]
    # A white edge separates neighbours, but would cover a very narrow bar.
    edges = [
        "white" if span[1] * points_per_ms > 3 else fill for span, fill in zip(spans, fills, strict=True)
    ]
    axes.broken_barh(spans, (top, height), facecolors=fills, edgecolors=edges, linewidth=0.7, zorder=2)
    look: dict[str, Any] = {"size": FONT_POINTS[height], "ha": "center", "va": "center_baseline"}
    for event, fill, (start, length) in zip(track, fills, spans, strict=True):
        if len(event.name) * LETTER * FONT_POINTS[height] < length * points_per_ms - 4:
            middle = start + length / 2, top + height / 2
            axes.text(*middle, event.name, color=readable_on(fill), parse_math=False, **look)


def shade(color: str, chunk: int) -> str:
    """Return the colour for the chunk-th stage of a rank: a quarter darker for each stage after the first."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = (part * 0.75**chunk for part in to_rgb(color))
    return to_hex((red, green, blue))


def _from_zero(events: Iterable[Event]) -> list[Event]:
    events = list(events)
    if not events:
        raise ValueError("nothing to draw: no events. Was start_recording() called before the first span?")
    zero = min(event.start_ns for event in events)
    return [event._replace(start_ns=event.start_ns - zero) for event in events]


def _palette(kinds: list[str]) -> dict[str, str]:
    others = dict.fromkeys(kind for kind in kinds if kind not in COLORS)
    spare = {kind: OTHER_COLORS[i % len(OTHER_COLORS)] for i, kind in enumerate(others)}
    return {kind: color for kind, color in (COLORS | spare).items() if kind in set(kinds)}


def readable_on(color: str) -> str:
    """Return black or white: the one with more contrast (relative luminance, WCAG 2)."""
    from matplotlib.colors import to_rgb

    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    return "white" if luminance < 0.179 else "black"
