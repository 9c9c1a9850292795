"""The page about the design draws the floors that are tested, and names what exists."""

import re

from tests.run_modes import ROOT
from tests.test_layout import FLOORS

PAGE = (ROOT / "docs" / "design.md").read_text()


def test_it_draws_the_floors_that_an_import_may_not_climb():
    drawing = PAGE.partition("never up or sideways:\n\n```\n")[2].partition("```")[0]
    _, *floors = drawing.splitlines()
    assert [set(line.split()) for line in reversed(floors)] == list(FLOORS)


def test_it_names_every_floor_of_the_house_and_files_that_exist():
    house = PAGE.partition("\n## The house\n")[2].partition("\nAn import")[0]
    named = set(re.findall(r"`([\w.]+/[\w./]*)`", PAGE))
    assert {f"{folder}/" for floor in FLOORS for folder in floor} <= named & set(
        re.findall(r"`(.+?)`", house)
    )
    assert not [name for name in named if not (ROOT / name).exists()]


def test_each_test_that_it_names_without_a_folder_is_in_several():
    names = set(re.findall(r"`(test_\w+\.py)`", PAGE))
    assert names and all(len(list((ROOT / "tests").glob(f"*/{name}"))) > 1 for name in names)


def test_its_commands_are_targets_of_the_makefile():
    targets = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = set(re.findall(r"`make ([\w-]+)`", PAGE))
    assert commands and commands <= set(targets)


def test_it_is_read_in_half_an_hour():
    assert len(PAGE.splitlines()) <= 200
