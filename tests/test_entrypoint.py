"""entrypoint.sh: the table of lessons, and what it refuses. Nothing is trained: python is a stub."""

import os
import re
import subprocess
import sys

import pytest

from tests.run_modes import MODES, ROOT


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
