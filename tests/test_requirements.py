"""pyproject.toml alone pins the packages: requirements.txt and the images install what it names."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest

from tests.run_modes import ROOT, python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {"lessons": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_requirements_install_the_workbook_with_all_its_extras():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    extras = ",".join(PROJECT["optional-dependencies"])
    assert [line for line in lines if not line.startswith("#")] == [f"-e .[{extras}]"]


def test_each_package_is_pinned_once():
    pins = [pin for group in PINS.values() for pin in group]
    names = [re.split("==|>=", pin)[0] for pin in pins]
    assert [pin for pin in pins if "==" not in pin] == ["torch>=2.13,<2.15"]
    assert len(set(names)) == len(names)


def test_ci_takes_a_version_of_torch_that_is_allowed():
    [locked] = re.findall("^torch==(.*)$", (ROOT / ".ci" / "lock.txt").read_text(), re.MULTILINE)
    assert f"TORCH={locked} " in (ROOT / ".ci" / "run").read_text()
    assert (2, 13) <= tuple(map(int, locked.split(".")[:2])) < (2, 15)


def test_an_image_installs_the_packages_of_its_group_and_no_others(tmp_path):
    [program] = re.findall(r'^RUN python -c "(.*?)"$', DOCKERFILE, re.MULTILINE | re.DOTALL)
    program = program.replace("\\\n", "").replace("pyproject.toml", f"{ROOT}/pyproject.toml")
    assert python("-c", program, cwd=tmp_path).returncode == 0
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


PRINT_LAB = "import lab; print(lab.__file__)"


def make_checkout(folder):
    for name in ("comm/rendezvous.py", "lab/__init__.py", "data_parallel/where.py"):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(PRINT_LAB if path.stem == "where" else "")
    return folder


def lab_imported_by(*arguments, cwd, **environment):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=variables, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(
    find_spec("distributed_training_workbook_path") is None, reason="the workbook is not installed here"
)
def test_a_script_and_pythonpath_come_before_the_checkout_that_is_installed(tmp_path):
    other = make_checkout(tmp_path / "other")
    of_the_other = str(other / "lab" / "__init__.py")
    assert lab_imported_by(other / "data_parallel" / "where.py", cwd=tmp_path) == of_the_other
    assert lab_imported_by("-c", PRINT_LAB, cwd=tmp_path, PYTHONPATH=str(other)) == of_the_other
    assert lab_imported_by("-c", PRINT_LAB, cwd=tmp_path) not in ("", of_the_other)
    site_packages = lab_imported_by("-c", "import comm; print(comm.__file__)", cwd=tmp_path)
    assert "site-packages" not in site_packages
