"""Test what `make run` makes of its variables. Nothing is trained: entrypoint.sh is a stub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ("RUN_MODE", "WORLD_SIZE", "ARGS")


@pytest.fixture
def checkout(tmp_path):
    """Make a folder that looks set up, with an entrypoint.sh that prints its settings."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "entrypoint.sh").write_text(f"printenv {' '.join(SETTINGS)} TORCHRUN\n")
    for name in ("requirements.txt", "pyproject.toml", "hatch_build.py"):
        (tmp_path / name).touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").write_text(f"{tmp_path}\n")
    return tmp_path


MADE = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")  # what `make test ARGS=...` hands down


def make_run(checkout: Path, *arguments: str, **env: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if name not in (*SETTINGS, *MADE)}
    command = ["make", "-C", str(checkout), "--no-print-directory", "run", *arguments]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_settings_arrive_as_they_were_given_or_with_their_defaults(checkout):
    launcher = ".venv/bin/python -m lab.launch.torchrun"
    assert make_run(checkout) == ["data_parallel_naive", "2", "", launcher]
    args = """--mb 16 * "two words" 'x' #"""
    assert make_run(checkout, f"ARGS={args}", "WORLD_SIZE=3") == ["data_parallel_naive", "3", args, launcher]
    assert make_run(checkout, ARGS=args, RUN_MODE="comm") == ["comm", "2", args, launcher]


@pytest.mark.parametrize("setting", SETTINGS)
def test_make_does_not_run_what_stands_in_a_setting(checkout, setting):
    text = "$(shell touch by_make) $(PYTHON) $$x"
    for printed in (make_run(checkout, f"{setting}={text}"), make_run(checkout, **{setting: text})):
        assert text in printed
    assert not (checkout / "by_make").exists()


def test_notebooks_are_copied_once_without_the_outputs_that_give_predictions_away(checkout):
    name = "01_ranks.ipynb"
    (checkout / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / name, checkout / "notebooks")
    (checkout / ".venv" / "bin").mkdir()
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    command = ["make", "-C", str(checkout), "my_notebooks"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    copy = checkout / "my_notebooks" / name
    cells = [cell for cell in json.loads(copy.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] for cell in cells)
    copy.write_text("mine")
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert copy.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "meant"),
    [("run comm", "RUN_MODE=comm"), ("run MODE=zero1", "RUN_MODE=zero1"), ("run LR=3", "ARGS='--steps 3'")],
)
def test_what_stands_in_the_wrong_place_runs_nothing(checkout, words, meant):
    (checkout / "comm").mkdir()
    clean = {name: value for name, value in os.environ.items() if name not in MADE}
    command = ["make", "-C", str(checkout), *words.split()]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "RUN_MODE" not in done.stdout
    assert f"make run {meant}" in done.stderr


PYTHON = """#!/usr/bin/env bash
# A Python whose pip notes what it is asked to install.
case "$*" in
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip config list") cat pip_config 2>/dev/null ;;
    "-m pip install"*) echo "$*" >> installed ;;
    *torch.__version__*) echo "Ready: all is there" ;;
esac
"""
CPU = "--extra-index-url https://download.pytorch.org/whl/cpu"


def set_up(checkout: Path, *arguments: str) -> tuple[str, str]:
    """Run `make setup` where no GPU is seen; return what pip is asked for, and what make says."""
    shutil.rmtree(checkout / ".venv")
    python = checkout / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    clean = {
        name: value for name, value in os.environ.items() if name not in (*SETTINGS, *MADE, "TORCH_INDEX_URL")
    }
    command = ["make", "-C", str(checkout), "--no-print-directory", "setup", f"PYTHON={python}"]
    if not any(argument.startswith("KFD=") for argument in arguments):
        command.append("KFD=/dev/null/no-driver")
    done = subprocess.run([*command, *arguments], env=clean, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return (checkout / "installed").read_text(), done.stderr


without_nvidia = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
    reason="this machine has an NVIDIA driver, so make takes no index for CPUs",
)


@without_nvidia
def test_set_up_installs_torch_for_the_cpu_quietly(checkout):
    installed, said = set_up(checkout)
    assert CPU in installed and "--quiet" in installed
    assert said.splitlines()[1:] == ["Ready: all is there"] and said.startswith("Setting up .venv")


@without_nvidia
def test_set_up_says_so_when_it_installs_torch_for_the_cpu_beside_an_amd_gpu(checkout):
    (checkout / "kfd").touch()
    installed, said = set_up(checkout, f"KFD={checkout}/kfd")
    assert CPU in installed
    assert "There is an AMD GPU" in said and "TORCH_INDEX_URL=https://download.pytorch.org/whl/rocm" in said


def test_set_up_takes_the_index_that_it_is_given(checkout):
    (checkout / "kfd").touch()
    installed, said = set_up(checkout, "TORCH_INDEX_URL=https://example.org/rocm", f"KFD={checkout}/kfd")
    assert "--extra-index-url https://example.org/rocm -r" in installed
    assert "AMD" not in said


@pytest.mark.parametrize("source", ["global.index-url='https://example.org'", ":env:.find-links='/wheels'"])
def test_set_up_leaves_pip_alone_where_it_has_sources_of_its_own(checkout, source):
    (checkout / "pip_config").write_text(f"{source}\n")
    (checkout / "kfd").touch()
    installed, said = set_up(checkout, f"KFD={checkout}/kfd")
    assert "index-url" not in installed and "AMD" not in said
