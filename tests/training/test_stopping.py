"""After Ctrl-C all ranks end their step together, save, and can go on."""

import os
import signal
from unittest import mock

import pytest

from comm.collectives import all_reduce
from lab import checkpoint
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.data_parallel.test_scripts import STEPS, everyones_summaries, train
from tests.training.attempts import interrupted


@pytest.mark.parametrize(
    ("name", "world_size", "where", "at", "last_step"),
    [
        ("naive", 2, "batch", 3, 3),
        ("overlap", 2, "step", 2, 2),
        ("bucket", 3, "batch", 1, 1),
        ("bucket", 3, "expect_traffic", 3, 3),
        ("bucket", 3, "batch", 4, 4),
        ("ddp", 2, "batch", 2, 2),
    ],
)
def test_after_ctrl_c_on_one_rank_all_stop_after_the_same_step_and_can_go_on(
    tmp_path, name, world_size, where, at, last_step
):
    def work(cluster: Cluster) -> tuple[str, str]:
        said = interrupted(cluster, name, where, at, world_size - 1, checkpoint=str(tmp_path))
        if cluster.is_main:
            assert os.listdir(tmp_path) == [checkpoint.NAME]
        return said, train(cluster, name, checkpoint=str(tmp_path), resume=True)["replica_digest"]

    [(said, resumed)] = set(run_ranks(work, world_size))
    assert said.startswith(f"130: stopped after step {last_step} of {STEPS};")
    assert str(tmp_path) in said and "\n" not in said
    assert resumed == everyones_summaries(world_size)[name][0]["replica_digest"]


@pytest.mark.parametrize("where", ["batch", "expect_traffic", "finish"])
def test_ctrl_c_in_the_last_step_lets_the_run_end_with_its_report(tmp_path, where):
    def work(cluster: Cluster) -> str:
        before = signal.getsignal(signal.SIGINT)
        at = 1 if where == "finish" else 2
        said = interrupted(cluster, "naive", where, at, 1, steps=2, checkpoint=str(tmp_path))
        assert signal.getsignal(signal.SIGINT) == before
        return said

    assert run_ranks(work, 2) == ["", ""]
    assert checkpoint.unpack(checkpoint.read(tmp_path), "")["step"] == 2


def test_ranks_ask_each_other_to_stop_only_where_there_is_a_checkpoint_and_outside_of_the_steps(tmp_path):
    def work(cluster: Cluster) -> list[tuple[int, int]]:
        found = []
        for options in ({}, {"checkpoint": str(tmp_path)}):
            with mock.patch("training.run.all_reduce", side_effect=all_reduce) as reductions:
                summary = train(cluster, "naive", steps=3, **options)
            found.append((reductions.call_count - 3, summary["bytes_sent"]))  # 3 of the loss
        return found

    for (asked, sent), (asked_with_checkpoint, sent_with_checkpoint) in run_ranks(work, 2):
        assert (asked, asked_with_checkpoint) == (0, 2)  # the last step ends the run anyway
        assert sent == sent_with_checkpoint
