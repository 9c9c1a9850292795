"""Whenever ranks are killed, at any moment, the last complete checkpoint is there and loads."""

import functools
import os
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.training.checkpoint_toys import load, load_step, save, shards_of_rank
from training import checkpoint
from training.checkpoint import Checkpoints


def save_and_die(cluster: Cluster, folder: Path, step: int, victim: int, call: int) -> None:
    """Save the value 2, and kill a rank when it has changed something on disk for the `call`-th time."""
    calls = 0

    def deadly(change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = change(*args, **kwargs)
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    checkpoints = Checkpoints(folder, cluster, keep=1)
    load_step(checkpoints, cluster, 1)
    if cluster.rank == victim:
        changes = [(zlib, "crc32"), (checkpoint, "save_file"), (os, "fsync"), (os, "replace")]
        for owner, name in [*changes, (os, "unlink"), (os, "rmdir")]:
            setattr(owner, name, functools.partial(deadly, getattr(owner, name)))
    shards = shards_of_rank(cluster.rank, cluster.world_size, 2)
    checkpoints.save(step, shards, {"value": 2})
    checkpoints.wait()


@pytest.mark.parametrize(("victim", "step"), [(0, 2), (1, 2), (0, 1)])
def test_after_each_change_on_disk_a_kill_leaves_a_complete_checkpoint(tmp_path, victim, step):
    """Step 1 is there, and step 2 is saved, or step 1 is saved again."""
    run_ranks(save, 2, tmp_path / "begun", 1)
    newest = []
    for call in range(1, 100):
        folder = tmp_path / f"killed-{call}"
        shutil.copytree(tmp_path / "begun", folder)
        [*results] = run_ranks(save_and_die, 2, folder, step, victim, call, timeout=30, collect_failures=True)
        if "SIGKILL" not in str(results[victim]):
            break
        newest += run_ranks(load, 1, folder)
        for one in folder.iterdir():
            assert len(os.listdir(one)) == 3, "there are two files and a manifest"
    assert len(newest) > 3 and newest == sorted(newest)
    assert set(newest) == ({1, 2} if victim == 0 else {1})
