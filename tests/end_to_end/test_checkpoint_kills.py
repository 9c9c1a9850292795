"""Whenever ranks are killed, at any moment, the last complete checkpoint is there and loads."""

import functools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_parallel import checkpoint_folder as files
from hybrid_parallel.checkpoint import BackgroundCheckpoints
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from tests.hybrid_parallel.checkpoint_toys import load, load_step, pieces_of, save


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
