"""Test what `make run` makes of its variables. Nothing is trained: entrypoint.sh is a stub."""

import os
import shutil
import subprocess
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


def make_run(checkout: Path, *arguments: str, **env: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    command = ["make", "-C", str(checkout), "--no-print-directory", "run", *arguments]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_settings_arrive_as_they_were_given_or_with_their_defaults(checkout):
    launcher = ".venv/bin/python -m lab.torchrun"
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
