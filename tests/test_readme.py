"""The READMEs list every RUN_MODE."""

import re

import pytest

from tests.run_modes import MODES, ROOT

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
