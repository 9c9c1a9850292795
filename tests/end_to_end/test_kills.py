"""Training that is killed at random moments continues from its last complete checkpoint, with the same bits.

KILLS=200 make check-runs ARGS='-k killed'      tries 200 moments instead of 20
"""

import dataclasses
import functools
import os
import random
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_parallel import train_hybrid
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from tests.hybrid_parallel.test_run import ARGS, summaries
from tests.training.checkpoint_toys import load, load_step, save, shards_of_rank
from training import checkpoint
from training.checkpoint import Checkpoints, complete_steps

KILLS = int(os.environ.get("KILLS", "20"))
WAY: dict[str, Any] = {"zero": 1, "layers": 2, "clip": 1.0}  # each of 2 ranks saves a shard of the optimizer


def train_until_killed(
    cluster: Cluster, folder: Path, progress: Path, victims: list[int], moment: float
) -> None:
    """Resume, train, and save after every step. `progress` gets the step of each complete checkpoint.

    A victim dies `moment` times as long after its first checkpoint as that has taken.
    """
    complete, write = checkpoint.write_manifest, Checkpoints._write
    begin, steps = time.perf_counter(), complete_steps(folder)
    newest, noted = max(steps, default=0), int(progress.read_text())
    assert newest >= noted, f"the checkpoint of step {noted} was complete, and the newest is of step {newest}"

    def note(*args: Any) -> None:
        complete(*args)
        with progress.open("r+") as file:  # not emptied before: a kill leaves one number or the other
            file.write(f"{complete_steps(folder)[-1]:08}")

    def write_and_die(self: Checkpoints, *args: Any) -> None:
        write(self, *args)
        if cluster.rank in victims and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            # No handler: the kernel ends the process, whatever its threads do.
            signal.setitimer(signal.ITIMER_REAL, moment * (time.perf_counter() - begin))

    checkpoint.write_manifest = note
    Checkpoints._write = write_and_die  # type: ignore[method-assign]
    saving = {"checkpoint": str(folder), "checkpoint_every": 1, "checkpoint_keep": 2, "auto_resume": True}
    train_hybrid.main(cluster, dataclasses.replace(ARGS, steps=1_000_000, **WAY, **saving))


def test_a_training_killed_at_random_moments_loses_no_checkpoint_and_ends_with_the_same_bits(tmp_path):
    choice, folder, progress = random.Random(1), tmp_path / "run", tmp_path / "progress"
    progress.write_text("0" * 8)
    for _ in range(KILLS):
        victims, moment = choice.choice([[0], [1], [0, 1]]), choice.uniform(0, 1)
        with pytest.raises(RankError, match="SIGALRM"):
            run_ranks(train_until_killed, 2, folder, progress, victims, moment, timeout=60)
    steps = complete_steps(folder)[-1] + 1
    assert steps > KILLS, "each attempt completes a checkpoint at least"
    [resumed] = summaries(2, [WAY | {"steps": steps, "checkpoint": str(folder), "resume": True}])
    [undisturbed] = summaries(2, [WAY | {"steps": steps}])
    assert resumed["steps"] == 1
    for figure in ("last_loss", "replica_digest"):
        assert resumed[figure] == undisturbed[figure], figure
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert len(left) <= 3 * 3, "there are 3 checkpoints of a manifest and two files, and no leftovers"


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
