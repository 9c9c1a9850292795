from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from lab.trace.gantt import COLORS, Event, draw

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


def test_a_picture_of_nothing_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="start_recording"):
        draw([], tmp_path / "a.png")
