"""Every RUN_MODE runs without options on any number of ranks, and pages explain its report.

On four ranks tests/containers trains every mode.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import tyro

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.trace.meter import Meter
from tests.run_modes import MODES, NEXT, ROOT, SCRIPTS, few_steps, start_of, without_measuring
from training import conclusion
from training.run import Run

NAMES = [mode for mode, _, _ in MODES]
REPORT = (ROOT / "docs" / "report.md").read_text()
WITH_README = {script.partition("/")[0] for script in SCRIPTS.values()} - {"comm"}
DRIFTS = "train"  # its replicas do not stay equal, and it shows that


class TheLoopBegins(Exception):
    """Raised where a run would take its first step."""


class Reports(NamedTuple):
    """What rank 0 reports, by mode: all figures, and the rows and the sentences that people see."""

    figures: dict[str, dict[str, Any]]
    rows: dict[str, list[tuple[str, str]]]
    sentences: dict[str, list[str]]


@functools.cache
def everything() -> Reports:
    """Run every mode with its defaults on 2 ranks for a few steps."""

    def work(cluster: Cluster) -> Reports:
        found = Reports({}, {}, {})

        def noting(where: dict[str, Any], mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **extras: Any) -> Any:
                where[mode] = function(*args, **extras)
                return where[mode]

            return noted

        for mode in NAMES:
            main, arguments = start_of(mode)
            with (
                without_measuring(),
                mock.patch.object(Meter, "finish", noting(found.figures, mode, Meter.finish)),
                mock.patch.object(conclusion, "rows", noting(found.rows, mode, conclusion.rows)),
                mock.patch.object(
                    conclusion, "sentences", noting(found.sentences, mode, conclusion.sentences)
                ),
            ):
                main(cluster, tyro.cli(arguments, args=few_steps(mode)))
        return found

    return run_ranks(work, 2, timeout=300)[0]


def reports() -> dict[str, dict[str, Any]]:
    """Return rank 0's figures by mode."""
    return everything().figures


def test_every_mode_trains_with_its_defaults():
    for mode in NAMES:
        if mode not in ("comm", "point_to_point"):
            report = reports()[mode]
            assert (report["run_mode"], report["world_size"], report["steps"]) == (mode, 2, 1)
            assert math.isfinite(report["last_loss"]), mode
            assert report["replicas_equal"] is (mode != DRIFTS), mode


@pytest.mark.parametrize("world_size", [1, 3, 4, 6, 8])
def test_every_mode_accepts_its_defaults_and_begins_to_train(world_size: int):
    def work(cluster: Cluster) -> list[str]:
        begun = []
        for mode in NAMES:
            main, arguments = start_of(mode)
            args = tyro.cli(arguments, args=few_steps(mode))
            with without_measuring(), mock.patch.object(Run, "batches", side_effect=TheLoopBegins):
                try:
                    main(cluster, args)
                except TheLoopBegins:
                    pass
                except WorkbookError as error:
                    assert mode == "point_to_point" and cluster.world_size == 1, f"{mode}: {error}"
                    assert str(error).endswith("(WORLD_SIZE=2).")  # says how to start two
                    continue
            begun.append(mode)
        return begun

    alone = {"point_to_point"} if world_size == 1 else set()
    for begun in run_ranks(work, world_size, timeout=300):
        assert set(begun) == set(NAMES) - alone


@pytest.mark.parametrize("mode", NAMES)
def test_each_row_of_a_report_is_explained(mode: str):
    folder = SCRIPTS[mode].partition("/")[0]
    texts = REPORT + ((ROOT / folder / "README.md").read_text() if folder in WITH_README else "")
    first_cells = re.findall(r"^\| (`\w+`[^|]*) \|", texts, re.MULTILINE)
    explained = set(re.findall(r"`(\w+)`", "\n".join(first_cells)))
    shown = {name for name, value in reports().get(mode, {}).items() if value is not None}
    assert shown <= explained, shown - explained


def test_the_sample_report_has_the_rows_of_a_run_and_no_report_has_more_than_ten():
    [sample] = re.findall(r"^[│┌├└].*[│┐┤┘]$(?:\n[│┌├└].*$)*", REPORT, re.MULTILINE)
    named = re.findall(r"^│ (\w[\w ]*?) +│", sample, re.MULTILINE)
    _, rows, sentences = everything()
    on_a_busy_machine = {"neither"}
    assert named == [name for name, _ in rows["data_parallel_naive"] if name not in on_a_busy_machine]
    for mode in reports():
        assert 4 <= len(rows[mode]) <= 10, mode
        assert 1 <= len(sentences[mode]) <= 2, mode
        assert sentences[mode][-1] == NEXT[mode]
