"""Show a figure in a notebook as a picture with a text that describes it.

    figure, axes = plt.subplots()
    axes.bar(["expected", "counted"], [6, 6], color=COLORS["communication"])
    show(figure, alt="Two bars of equal height: each rank sends 6 MB, as the formula says.")

The text stands for the picture where it cannot be seen: in a terminal, and for readers of a screen reader.
"""

import io
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.figure import Figure

from lab.trace.gantt import COLORS, Event, draw_panels

__all__ = ["COLORS", "show", "show_events"]


def show(figure: Figure, alt: str) -> None:
    """Display a matplotlib figure as PNG, on white, and close it. `alt` says in a sentence what it shows."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    _display(image.getvalue(), alt)


def show_events(events: Iterable[Event] | Mapping[str, Iterable[Event]], alt: str) -> None:
    """Display events as a Gantt chart (lab/trace/gantt.py), or several named charts one above the other."""
    panels = events if isinstance(events, Mapping) else {"": events}
    with tempfile.TemporaryDirectory() as folder:
        path = draw_panels(panels, Path(folder) / "events.png", width=9.0)
        _display(path.read_bytes(), alt)


def _display(image: bytes, alt: str) -> None:
    display({"image/png": image, "text/plain": alt}, metadata={"image/png": {"alt": alt}}, raw=True)
