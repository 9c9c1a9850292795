"""requirements.txt, which make and the image install, and pyproject.toml name the same packages."""

import re
import tomllib

from tests.run_modes import ROOT

TEXT = (ROOT / "requirements.txt").read_text()


def section(name: str) -> list[str]:
    """Return the pins below a heading, up to the next empty line."""
    return re.search(rf"^# {name}\b.*\n((?:\S.*\n)*)", TEXT, re.MULTILINE)[1].split()


def test_both_files_pin_the_same_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"lessons": project["dependencies"], **project["optional-dependencies"]}
    assert {name: section(name) for name in wanted} == wanted
    pins = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
    assert pins == [*(pin for pins in wanted.values() for pin in pins), "-e ."]
    assert all("==" in pin for pin in pins[:-1])


def test_an_image_installs_the_packages_of_its_section_and_no_others():
    text = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL)
    assert {name: re.findall(r"/\^# (\w+)/,/\^\$/p", text) for name, text in stages} == {
        "libraries": ["lessons"],
        "lessons": [],  # from libraries, as the notebook
        "notebook": ["notebook"],
    }
    assert not {"jupyter", "pytest"} & {pin.split("==")[0] for pin in section("lessons")}
