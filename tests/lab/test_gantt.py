from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from lab.trace.gantt import COLORS, Event, draw, draw_panels

MS = 1_000_000


def where(picture: Path, colour: str) -> np.ndarray:
    """Return which pixels have exactly this colour, in shape (height, width)."""
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    return (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1)


def test_the_picture_shows_each_rank_and_each_kind_in_its_colour(tmp_path):
    events = [Event("forward", "forward", 0, 6 * MS, rank=r) for r in range(2)]
    events += [Event("step", "optimizer", 6 * MS, 4 * MS, rank=r) for r in range(2)]
    picture = draw(events, tmp_path / "a.png", title="two ranks")
    forward, step = where(picture, COLORS["forward"]), where(picture, COLORS["optimizer"])
    rows_with_forward = forward.sum(axis=1) > forward.shape[1] // 4
    assert (rows_with_forward[1:] & ~rows_with_forward[:-1]).sum() == 2, "one row of bars per rank"
    assert 1.2 < forward.sum() / step.sum() < 1.8, "6 ms beside 4 ms"


def test_panels_stand_one_above_the_other_from_zero_with_one_scale_of_time(tmp_path):
    late = 70_000 * MS  # a clock that has been running
    panels = {
        "measured": [Event("0", "forward", late, 20 * MS, rank=rank) for rank in range(2)],
        "simulated": [Event("0", "backward", 0, 10 * MS, rank=rank) for rank in range(2)],
    }
    picture = draw_panels(panels, tmp_path / "a.png", title="one of each")
    measured, simulated = where(picture, COLORS["forward"]), where(picture, COLORS["backward"])
    long, short = (np.flatnonzero(seen.sum(axis=0) > 50) for seen in (measured, simulated))  # not the legend
    assert abs(long.min() - short.min()) <= 1 and abs(np.ptp(long) / np.ptp(short) - 2) < 0.02
    upper, lower = (np.flatnonzero(seen.sum(axis=1) > 100) for seen in (measured, simulated))
    assert upper.max() < lower.min()


def test_a_picture_of_nothing_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="start_recording"):
        draw([], tmp_path / "a.png")
