"""Training that is killed at random moments continues from its last complete checkpoint, with the same bits.

KILLS=200 make check-runs ARGS='-k killed'      tries 200 moments instead of 20
"""

import dataclasses
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hybrid_parallel import train_hybrid
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from tests.hybrid_parallel.test_run import ARGS, summaries
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
