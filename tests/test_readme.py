"""The README lists every RUN_MODE, and explains every row of every report."""

import re

import pytest

from tests.run_modes import MODES, ROOT, SCRIPTS
from tests.test_defaults import reports

TOP = (ROOT / "README.md").read_text()
LESSONS = sorted({script.partition("/")[0] for _, script, _ in MODES} - {"comm"})


def rows_of(text: str, folder: str = "") -> list[tuple[str, str, str]]:
    """Return the RUN_MODE, script and description in each row of a table of lessons."""
    rows = re.findall(r"^\| `(\w+)` \| \[([^]]+)\]\(\2\)[^|]* \| (.+) \|$", text, re.MULTILINE)
    return [(mode, folder + script, what.replace("`", "")) for mode, script, what in rows]


def test_the_top_readme_lists_the_lessons_of_entrypoint_in_its_words():
    assert rows_of(TOP) == MODES


@pytest.mark.parametrize("folder", LESSONS)
def test_the_readme_of_a_folder_lists_its_lessons(folder: str):
    listed = rows_of((ROOT / folder / "README.md").read_text(), f"{folder}/")
    assert [row[:2] for row in listed] == [row[:2] for row in MODES if row[1].startswith(f"{folder}/")]


@pytest.mark.parametrize("mode", [mode for mode, _, _ in MODES])
def test_each_row_of_a_report_is_explained(mode: str):
    folder = SCRIPTS[mode].partition("/")[0]
    texts = TOP + ((ROOT / folder / "README.md").read_text() if folder in LESSONS else "")
    first_cells = re.findall(r"^\| (`\w+`[^|]*) \|", texts, re.MULTILINE)
    explained = set(re.findall(r"`(\w+)`", "\n".join(first_cells)))
    shown = {name for name, value in reports(2).get(mode, {}).items() if value is not None}
    assert shown <= explained, shown - explained


def test_the_sample_report_has_the_rows_of_a_run():
    [sample] = re.findall(r"^[│┌├└].*[│┐┤┘]$(?:\n[│┌├└].*$)*", TOP, re.MULTILINE)
    named = re.findall(r"^│ (\w+) +│", sample, re.MULTILINE)
    assert named == [name for name, value in reports(2)["data_parallel_naive"].items() if value is not None]
