from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from lab.trace.gantt import COLORS, Event, draw, draw_panels, shade

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


def test_the_picture_can_be_an_svg_and_takes_names_that_look_like_formulas(tmp_path):
    path = draw([Event(r"in $ or \frac$", "of no known kind", 0, MS)], tmp_path / "a.svg")
    assert path.read_text().startswith("<?xml")


def test_another_lane_is_a_thinner_bar_below_the_main_one(tmp_path):
    events = [Event("f", "forward", 0, MS), Event("b", "communication", 0, MS, "communication")]
    picture = draw(events, tmp_path / "a.png")
    main, side = (
        np.flatnonzero(where(picture, COLORS[kind]).sum(axis=1) > 1000)
        for kind in ("forward", "communication")
    )
    assert main.max() < side.min() and 0.3 * len(main) < len(side) < 0.8 * len(main)


@pytest.mark.parametrize("start", [0, 200 * MS, 500 * MS])
def test_an_event_of_no_length_is_a_tick_in_its_colour_as_high_as_its_lane(start, tmp_path):
    around = [Event("f", "forward", 0, 200 * MS), Event("b", "backward", 200 * MS, 300 * MS)]
    tick = Event("launch", "optimizer", start, 0, "launches")
    picture = draw([*around, tick], tmp_path / "a.png")
    columns = where(picture, COLORS["optimizer"]).sum(axis=0) > 15  # 0.16 inches are 24; the legend's are 13
    bars = where(picture, COLORS["forward"]) | where(picture, COLORS["backward"])
    seen, span_of_all = np.flatnonzero(columns), np.flatnonzero(bars.sum(axis=0) > 15)
    assert 2 <= len(seen) <= 5
    at = (seen.mean() - span_of_all.min()) / (span_of_all.max() - span_of_all.min())
    assert abs(at - start / (500 * MS)) < 0.005


def test_a_tick_is_not_covered_by_the_bar_that_follows_it(tmp_path):
    events = [Event("launch", "optimizer", 0, 30_000), Event("wait", "wait", 30_000, 500 * MS)]
    picture = draw(events, tmp_path / "a.png")
    columns = where(picture, COLORS["optimizer"]).sum(axis=0) > 15
    assert 2 <= columns.sum() <= 5, "30 us of 500 ms alone would be a tenth of a pixel"


def test_no_two_kinds_share_a_colour():
    assert len(set(COLORS.values())) == len(COLORS) and "launch" in COLORS


def test_a_picture_of_nothing_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="start_recording"):
        draw([], tmp_path / "a.png")


def steps(ms: int, kind: str, begin: int = 0, **args: int) -> list[Event]:
    """Return an event of `ms` milliseconds for each of two ranks."""
    return [Event("0", kind, begin, ms * MS, args=args, rank=rank) for rank in range(2)]


def test_panels_stand_one_above_the_other_from_zero_with_one_scale_of_time(tmp_path):
    late = 70_000 * MS  # a clock that has been running
    panels = {"measured": steps(20, "forward", late), "simulated": steps(10, "backward")}
    picture = draw_panels(panels, tmp_path / "a.png", title="one of each")
    measured, simulated = where(picture, COLORS["forward"]), where(picture, COLORS["backward"])
    long, short = (np.flatnonzero(seen.sum(axis=0) > 50) for seen in (measured, simulated))  # not the legend
    assert abs(long.min() - short.min()) <= 1 and abs(np.ptp(long) / np.ptp(short) - 2) < 0.02
    upper, lower = (np.flatnonzero(seen.sum(axis=1) > 100) for seen in (measured, simulated))
    assert upper.max() < lower.min()


def test_each_panel_has_all_its_ranks_and_its_name(tmp_path):
    panels = {"gpipe $ 50%": steps(20, "forward"), "1f1b": steps(10, "backward")}
    text = draw_panels(panels, tmp_path / "a.svg").read_text()
    assert text.count("<!-- rank 0 -->") == text.count("<!-- rank 1 -->") == 2
    assert "<!-- gpipe $ 50% -->" in text and "<!-- 1f1b -->" in text


def test_a_later_chunk_is_darker_and_the_legend_says_so(tmp_path):
    events = [*steps(20, "forward", chunk=0), *steps(20, "forward", 20 * MS, chunk=1)]
    picture = draw(events, tmp_path / "a.png")
    early, late = where(picture, COLORS["forward"]), where(picture, shade(COLORS["forward"], 1))
    assert 0.9 < early.sum() / late.sum() < 1.1
    assert "darker" in draw(events, tmp_path / "a.svg").read_text()
    assert "darker" not in draw(steps(20, "forward"), tmp_path / "b.svg").read_text()


def test_no_shade_of_one_kind_is_another_kinds_colour():
    shades = [
        shade(color, chunk).lower()
        for kind, color in COLORS.items()
        if kind != "launch"
        for chunk in range(4)
    ]
    assert len(set(shades)) == len(shades)
    assert shade("red", 0) == "red", "callers give names, too"


def test_a_panel_of_nothing_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="'simulated'"):
        draw_panels({"measured": steps(1, "forward"), "simulated": []}, tmp_path / "a.png")
    with pytest.raises(ValueError, match="no panels"):
        draw_panels({}, tmp_path / "a.png")
