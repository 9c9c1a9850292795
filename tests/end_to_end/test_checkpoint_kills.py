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
from training.checkpoint import Checkpoints


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

    checkpoints = Checkpoints(folder, cluster, keep=1)
    load_step(checkpoints, cluster, 1)
    if cluster.rank == victim:
        for owner, name in [(zlib, "crc32"), (shutil, "rmtree"), (os, "rename"), (os, "fsync")]:
            setattr(owner, name, functools.partial(deadly, getattr(owner, name)))
    shards = shards_of_rank(cluster.rank, cluster.world_size, 2)
    checkpoints.save(2, shards, {"step": 2})
    checkpoints.wait()


@pytest.mark.parametrize("victim", [0, 1])
def test_after_each_change_on_disk_a_kill_leaves_a_complete_checkpoint(tmp_path, victim):
    run_ranks(save, 2, tmp_path / "begun", 1)
    newest = []
    for call in range(1, 100):
        folder = tmp_path / f"killed-{call}"
        shutil.copytree(tmp_path / "begun", folder)
        [*results] = run_ranks(save_and_die, 2, folder, victim, call, timeout=30, collect_failures=True)
        if "SIGKILL" not in str(results[victim]):
            break
        newest += run_ranks(load, 1, folder)
        assert all(name.startswith("step-") and ".tmp" not in name for name in os.listdir(folder))
    assert len(newest) > 3 and newest == sorted(newest)
    assert set(newest) == ({1, 2} if victim == 0 else {1})
