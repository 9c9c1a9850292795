"""A rank that is stopped (SIGSTOP), as by a debugger, ends every RUN_MODE in time, with a sentence."""

import os
import re
import signal
import threading
import time
from unittest import mock

import pytest
import tyro

from comm.point_to_point import ring_non_blocking
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from tests.run_modes import MODES, start_of, without_measuring
from training.run import Run

OP_TIMEOUT = 2.0
LONG = {"comm": ["--mb", "1", "--repeats", "1000"], "point_to_point": []}
LONG |= {"train": ["--steps", "100000"]}
LONG |= {mode: ["--steps", "100000", "--patience", "1"] for mode in ("hybrid_elastic", "hybrid_elastic_mesh")}
LONG |= {"diloco_elastic": ["--steps", "100000", "--patience", "1", "--sync-every", "2"]}
ALONE = ("local_sgd", "diloco_plain", "diloco")  # they notice it only when they synchronise
LONG |= {mode: ["--steps", "100000", "--sync-every", "2"] for mode in ALONE}
SENTENCES = "is stuck or is paused|Timed out waiting 2000ms|Connect timeout|rank 1 has not answered within"


def stop_rank_1(cluster: Cluster, mode: str) -> None:
    """Run a mode and stop rank 1 in it: before its second ring, after two steps, or after a second."""
    stopped_at, next_batch = [time.monotonic()], Run._next_batch

    def stop() -> None:
        stopped_at.append(time.monotonic())
        if cluster.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def begin_step(run: Run, step: int):
        if step == 2:
            stop()
        return next_batch(run, step)

    def ring(*args) -> None:
        stop()
        ring_non_blocking(*args)

    ring.__name__ = ring_non_blocking.__name__
    main, arguments = start_of(mode)
    os.environ["OP_TIMEOUT"] = str(OP_TIMEOUT)
    if mode in LONG and mode not in ("point_to_point", *ALONE):
        threading.Timer(1.0, stop).start()
    second_ring = mock.patch("comm.point_to_point.ring_non_blocking", ring)
    with without_measuring(), mock.patch.object(Run, "_next_batch", begin_step), second_ring:
        try:
            main(cluster, tyro.cli(arguments, args=LONG.get(mode, ["--steps", "100000"])))
        finally:
            waited = time.monotonic() - stopped_at[-1]
            assert waited < OP_TIMEOUT + 3, f"rank {cluster.rank} waited {waited:.1f} s"


@pytest.mark.parametrize("mode", [mode for mode, _, _ in MODES])
def test_a_stopped_rank_ends_the_job_with_a_sentence(mode: str):
    with pytest.raises(RankError) as error:
        run_ranks(stop_rank_1, 2, mode, timeout=30, group_timeout=OP_TIMEOUT)
    assert "rank 0 failed" in str(error.value), error.value
    assert re.search(SENTENCES, str(error.value)), error.value
    assert "AssertionError" not in str(error.value)
