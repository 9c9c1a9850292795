"""pyproject.toml alone pins the packages: requirements.txt and the images install what it names."""

import re
import subprocess
import sys
import tomllib

from tests.run_modes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {"lessons": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_requirements_install_the_workbook_with_all_its_extras():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    extras = ",".join(PROJECT["optional-dependencies"])
    assert [line for line in lines if not line.startswith("#")] == [f"-e .[{extras}]"]


def test_each_package_is_pinned_once():
    pins = [pin for group in PINS.values() for pin in group]
    names = [pin.partition("==")[0] for pin in pins]
    assert all("==" in pin for pin in pins) and len(set(names)) == len(names)


def test_an_image_installs_the_packages_of_its_group_and_no_others(tmp_path):
    [program] = re.findall(r'^RUN python -c "(.*?)"$', DOCKERFILE, re.MULTILINE | re.DOTALL)
    command = [
        sys.executable,
        "-c",
        program.replace("\\\n", "").replace("pyproject.toml", f"{ROOT}/pyproject.toml"),
    ]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert {path.stem: path.read_text().split() for path in tmp_path.iterdir()} == {
        name: PINS[name] for name in ("lessons", "notebook")
    }
    stages = re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert {name: re.findall(r"-r /tmp/(\w+)\.txt", text) for name, text in stages} == {
        "pins": [],
        "libraries": ["lessons"],
        "lessons": [],  # from libraries, as the notebook
        "notebook": ["notebook"],
    }
    assert not {"jupyter", "pytest"} & {pin.split("==")[0] for pin in PINS["lessons"]}
