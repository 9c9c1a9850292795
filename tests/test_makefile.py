"""What make and entrypoint.sh make of their variables. Nothing is trained: the programs below are stubs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_modes import MODES, ROOT

SETTINGS = ("RUN_MODE", "WORLD_SIZE", "ARGS")
OF_OTHER_WAYS = ("MODES", "FROM", "TO", "LINK", "LINK_DELAY", "CONTAINERS")


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


def make(checkout: Path, *words: str, timeout: float = 30, **env: str) -> subprocess.CompletedProcess[str]:
    own = (*SETTINGS, *OF_OTHER_WAYS, *MADE, "TORCH_INDEX_URL")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    command = ["make", "-C", str(checkout), "--no-print-directory", *words]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=timeout)


def make_run(checkout: Path, *arguments: str, **env: str) -> list[str]:
    done = make(checkout, "run", *arguments, **env)
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
    assert make(checkout, "my_notebooks", timeout=300).returncode == 0
    copy = checkout / "my_notebooks" / name
    cells = [cell for cell in json.loads(copy.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] for cell in cells)
    copy.write_text("mine")
    assert make(checkout, "my_notebooks", timeout=300).returncode == 0
    assert copy.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "meant"),
    [("run comm", "RUN_MODE=comm"), ("run MODE=zero1", "RUN_MODE=zero1"), ("run LR=3", "ARGS='--steps 3'")],
)
def test_what_stands_in_the_wrong_place_runs_nothing(checkout, words, meant):
    (checkout / "comm").mkdir()
    done = make(checkout, *words.split())
    assert done.returncode == 2 and "RUN_MODE" not in done.stdout
    assert f"make run {meant}" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run MODES=zero1", "make run reads RUN_MODE WORLD_SIZE ARGS LINK LINK_DELAY, and not MODES."),
        ("compare RUN_MODE=zero1", "and not RUN_MODE."),
        ("run CONTAINERS=1 FROM=naive", "and not FROM CONTAINERS."),
        ("diff ARGS=--json", "make diff reads FROM TO, and not ARGS."),
        ("lint ARGS=comm", "make lint reads no settings, and not ARGS."),
    ],
)
def test_a_setting_that_a_target_does_not_read_is_refused(checkout, words, said):
    done = make(checkout, *words.split())
    assert done.returncode == 2 and done.stdout == "" and said in done.stderr


def test_a_setting_in_the_environment_that_is_not_read_is_named_and_what_is_read_arrives(checkout):
    (checkout / "entrypoint.sh").write_text("printenv LINK LINK_DELAY RUN_MODE\n")
    text = "$(shell touch by_make)"
    done = make(checkout, "run", MODES="zero1", CONTAINERS="1", LINK=text, LINK_DELAY="2ms", RUN_MODE="comm")
    assert done.stdout.splitlines() == [text, "2ms", "comm"] and not (checkout / "by_make").exists()
    assert [line.split()[-1] for line in done.stderr.splitlines()] == ["MODES", "CONTAINERS"]
    done = make(checkout, "run", f"LINK={text}", "RUN_MODE=comm")
    assert done.stdout.splitlines() == [text, "", "comm"]
    assert not (checkout / "by_make").exists()


PYTHON = """#!/usr/bin/env bash
# A Python whose pip notes what it is asked to install.
case "$*" in
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip config list") cat pip_config 2>/dev/null ;;
    "-m pip install"*) echo "$* $PIP_USER$PIP_TARGET" >> installed ;;
    *torch.__version__*) echo "Ready: all is there" ;;
esac
"""
CPU = "--extra-index-url https://download.pytorch.org/whl/cpu"


def set_up(checkout: Path, *arguments: str, **env: str) -> tuple[str, str]:
    """Run `make setup` where no GPU is seen; return what pip is asked for, and what make says."""
    shutil.rmtree(checkout / ".venv")
    python = checkout / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    words = ["setup", f"PYTHON={python}", *arguments]
    if not any(argument.startswith("KFD=") for argument in arguments):
        words.append("KFD=/dev/null/no-driver")
    done = make(checkout, *words, **env)
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


def test_set_up_installs_into_the_environment_wherever_pip_installs_otherwise(checkout):
    installed, _ = set_up(checkout, PIP_USER="1", PIP_TARGET="/elsewhere")
    assert installed.endswith("-r requirements.txt 0\n")


@pytest.mark.parametrize("source", ["global.index-url='https://example.org'", ":env:.find-links='/wheels'"])
def test_set_up_leaves_pip_alone_where_it_has_sources_of_its_own(checkout, source):
    (checkout / "pip_config").write_text(f"{source}\n")
    (checkout / "kfd").touch()
    installed, said = set_up(checkout, f"KFD={checkout}/kfd")
    assert "index-url" not in installed and "AMD" not in said


@pytest.fixture
def entrypoint(tmp_path):
    """Run entrypoint.sh with a python that prints its arguments, one a line."""
    stub = tmp_path / "python"
    own = f'[ "$1" = -c ] && exec {sys.executable} "$@"'  # what the script itself asks python for
    stub.write_text(f'#!/usr/bin/env bash\n{own}\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        command = ["bash", str(ROOT / "entrypoint.sh"), *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, cwd=tmp_path)

    return run


def test_every_mode_names_a_script_that_exists_and_says_what_it_is():
    for _, script, what in MODES:
        assert (ROOT / script).is_file() and len(what) > 20, script


@pytest.mark.parametrize("env", [{"TORCHRUN": "echo"}, {"RUN_MODE": ""}, {"RUN_MODE": "q.*"}])
def test_a_missing_or_unknown_mode_lists_all_modes_and_exits_2(entrypoint, env):
    done = entrypoint(**env)
    assert done.returncode == 2
    assert done.stdout == ""
    first, *listed = done.stderr.splitlines()
    assert env.get("RUN_MODE") in (None, "") or env["RUN_MODE"] in first
    assert [line.split()[0] for line in listed] == [f"RUN_MODE={mode}" for mode, _, _ in MODES]
    assert all(line.endswith(what) for line, (_, _, what) in zip(listed, MODES, strict=True))


def test_a_misspelt_mode_is_answered_with_the_nearest_one_and_the_list_is_printed_on_request(entrypoint):
    said = entrypoint(RUN_MODE="com.").stderr
    assert said == "There is no RUN_MODE 'com.': did you mean comm? RUN_MODE=list shows all.\n"
    assert "did you mean data_parallel_naive?" in entrypoint(RUN_MODE="naive").stderr
    listed = entrypoint(RUN_MODE="list")
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) == len(MODES)


def test_a_rank_runs_the_script_with_the_words_of_ARGS(entrypoint):
    done = entrypoint("--first", RUN_MODE="comm", RANK="1", WORLD_SIZE="2", ARGS="--mb 16 * --json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["comm/tour.py", "--first", "--mb", "16", "*", "--json"]


def test_make_run_goes_through_torchrun(entrypoint):
    done = entrypoint(RUN_MODE="comm", WORLD_SIZE="3", ARGS="--json", TORCHRUN="echo torchrun", RANK="7")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"torchrun .*--nproc-per-node=3 comm/tour.py --json\n", done.stdout)
    assert done.stderr == ""
    done = entrypoint(RUN_MODE="comm", TORCHRUN="echo", RESTART="on-failure", MASTER_PORT="1")
    assert done.stderr == "make run does not use RESTART.\nmake run does not use MASTER_PORT.\n"


def test_a_node_beyond_the_world_says_so_and_exits_0(entrypoint):
    done = entrypoint(RUN_MODE="comm", RANK="2", WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(r".*not needed.* 2.*WORLD_SIZE is 2\.\n", done.stderr)


def test_of_nodes_with_the_same_settings_the_first_says_what_is_wrong_and_all_exit_2(entrypoint):
    wrong = {"WORLD_SIZE": "5"}, {"RUN_MODE": "no_such_lesson"}, {"LINK": "fast"}, {"WORLD_SIZE": "two"}
    for setting in wrong:
        for rank in range(4):
            env = {"RUN_MODE": "comm", "WORLD_SIZE": "4", "RANK": str(rank), "NODES": "4"} | setting
            done = entrypoint(**env)
            assert (done.returncode, done.stdout) == (2, "")
            assert bool(done.stderr) == (rank == 0)
    five = {"RUN_MODE": "comm", "RANK": "0", "WORLD_SIZE": "5", "NODES": "4"}
    assert "only 4 nodes" in entrypoint(**five).stderr
    assert entrypoint(**five, COMPOSE_PROFILES="more").returncode == 0
    assert "only 8 nodes" in entrypoint(**five | {"WORLD_SIZE": "9"}, COMPOSE_PROFILES="more").stderr


@pytest.mark.parametrize("world_size", ["0", "-1", "two", "04", "1 2"])
def test_a_world_size_that_is_no_positive_number_is_refused(entrypoint, world_size):
    done = entrypoint(RUN_MODE="comm", WORLD_SIZE=world_size, TORCHRUN="echo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"'{world_size}'" in done.stderr


@pytest.mark.parametrize(
    "setting",
    [{"LINK": link} for link in ("100", "mbit", "0mbit", "-1mbit", "100mbit;id", "1 gbit")]
    + [{"LINK_DELAY": delay} for delay in ("2", "2m", "-2ms", "2ms loss 5%")],
)
def test_a_link_that_makes_no_sense_is_refused_also_by_a_rank_that_is_not_needed(entrypoint, setting):
    done = entrypoint(RUN_MODE="comm", RANK="3", WORLD_SIZE="2", **setting)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert next(iter(setting)) in done.stderr


@pytest.mark.parametrize(
    "setting", [{"LINK": "1.5Gbit"}, {"LINK_DELAY": "0.5ms"}, {"LINK": "100mbit", "TORCHRUN": "echo"}]
)
def test_outside_a_container_no_link_is_shaped(entrypoint, setting):
    done = entrypoint(RUN_MODE="comm", RANK="0", WORLD_SIZE="1", **setting)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert "links of containers only" in done.stderr
    assert "--link " in done.stderr and next(iter(setting.values())) in done.stderr
    assert "comm/tour.py" in done.stdout
