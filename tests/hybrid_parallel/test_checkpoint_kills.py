"""Whenever ranks are killed, at any moment, the last complete checkpoint is there and loads."""

import functools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_parallel import checkpoint_folder as files
from hybrid_parallel.checkpoint import BackgroundCheckpoints
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from tests.hybrid_parallel.checkpoint_toys import load, load_step, pieces_of, save


def save_until_killed(
    cluster: Cluster, folder: Path, progress: Path, victims: list[int], moment: float
) -> None:
    """Load the newest checkpoint, which is as new as the newest that was complete; save on and on.

    A victim dies `moment` times as long after its first save as that has taken.
    """
    checkpoints = BackgroundCheckpoints(folder, cluster, keep=2)
    step, noted = checkpoints.latest() or 0, int(progress.read_text())
    assert step >= noted, f"the checkpoint of step {noted} was complete, and the newest is of step {step}"
    if step:
        load_step(checkpoints, cluster, step)
    begin, timer = time.perf_counter(), None
    while True:
        step += 1
        pieces = pieces_of(cluster.rank, cluster.world_size, step)
        checkpoints.save(step, pieces, {"step": step, "rank": cluster.rank})
        checkpoints.wait()
        if cluster.is_main:
            with progress.open("r+") as file:  # not emptied before: a kill leaves one number or the other
                file.write(f"{step:08}")
        if cluster.rank in victims and timer is None:
            delay = moment * (time.perf_counter() - begin)
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
            timer.start()


def kill(folder: Path, times: int, seed: int) -> int:
    """Kill ranks of a job at random moments, start it again each time, and return its last step."""
    choice, progress = random.Random(seed), folder / "progress"
    progress.write_text("0" * 8)
    for _ in range(times):
        victims = choice.choice([[0], [1], [0, 1]])
        with pytest.raises(RankError, match="SIGKILL"):
            run_ranks(
                save_until_killed, 2, folder / "run", progress, victims, choice.uniform(0, 3), timeout=60
            )
    return run_ranks(load, 3, folder / "run")[0]


def test_whenever_ranks_are_killed_the_last_complete_checkpoint_loads(tmp_path):
    assert kill(tmp_path, 20, seed=1) >= 20
    left = [path.name for path in (tmp_path / "run").rglob("*")]
    assert len(left) <= 2 * 4  # two checkpoints of a manifest and two files, and no leftovers


def save_and_die(cluster: Cluster, folder: Path, victim: int, call: int) -> None:
    """Save step 2, and kill a rank when it has changed something on disk for the `call`-th time."""
    calls = 0

    def deadly(change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = change(*args, **kwargs)
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    checkpoints = BackgroundCheckpoints(folder, cluster, keep=1)
    load_step(checkpoints, cluster, 1)
    if cluster.rank == victim:
        changes = [(files, "save_file"), (shutil, "rmtree"), (Path, "unlink"), (os, "replace"), (os, "fsync")]
        for owner, name in changes:
            setattr(owner, name, functools.partial(deadly, getattr(owner, name)))
        Path.unlink = functools.partialmethod(Path.unlink)  # type: ignore[method-assign]
    pieces = pieces_of(cluster.rank, cluster.world_size, 2)
    checkpoints.save(2, pieces, {"step": 2, "rank": cluster.rank})
    checkpoints.wait()


@pytest.mark.parametrize(("victim", "calls", "is_newer"), [(0, 9, 5), (1, 3, 9)])
def test_after_each_change_on_disk_a_kill_leaves_one_complete_checkpoint(tmp_path, victim, calls, is_newer):
    """From call `is_newer` on, the manifest of the newer checkpoint has its name."""
    run_ranks(save, 2, tmp_path / "begun", 1)
    for call in range(1, calls + 1):
        folder = tmp_path / f"killed-{call}"
        shutil.copytree(tmp_path / "begun", folder)
        with pytest.raises(RankError, match="SIGKILL"):
            run_ranks(save_and_die, 2, folder, victim, call, timeout=30)
        assert run_ranks(load, 1, folder) == [2 if call >= is_newer else 1]
        assert len(list(folder.glob("step-*/manifest"))) in (1, 2)
        assert len(list(folder.rglob("*.*"))) == 2 * len(list(folder.glob("step-*")))
