"""Two checkouts may share one environment: a script imports the packages that lie beside it."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

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
