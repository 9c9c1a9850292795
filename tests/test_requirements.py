"""requirements.txt, which make and the image install, and pyproject.toml name the same packages."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_both_files_pin_the_same_versions():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pins[:-1] == project["dependencies"]
    assert all("==" in pin for pin in pins[:-1])


def test_the_repository_itself_is_installed_last():
    assert (ROOT / "requirements.txt").read_text().splitlines()[-1] == "-e ."
