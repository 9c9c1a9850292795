"""What training.run does for all train scripts: batches, spans, the report."""

import json
from typing import Any
from unittest import mock

import pytest
import torch

from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace import timeline
from tests.data_parallel.test_scripts import train
from tests.training.attempts import refusal, the_one_sentence
from training.arguments import Args
from training.run import Run


def test_replicas_that_end_unequal_are_an_error_after_the_report(capfd):
    def work(cluster: Cluster) -> str:
        def drifting(self: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + (cluster.rank == 1)))

        with mock.patch.object(Run, "optimizer", drifting):
            return refusal(cluster, "naive", json=True)

    sentence = the_one_sentence(run_ranks(work, 3))
    assert "replicas are not equal after the last step (rank 1 differs from rank 0)" in sentence
    line = capfd.readouterr().out.splitlines()[-1]
    assert json.loads(line[line.index("{") :])["replicas_equal"] is False


@pytest.mark.parametrize("model", ["gpt", "baby_cnn"])
def test_the_slices_of_all_ranks_are_the_batch_of_one(model):
    def work(cluster: Cluster) -> tuple[torch.Tensor, torch.Tensor]:
        return Run(cluster, Args(size="tiny", batch_size=12), "batches", model).batch(3)

    [whole] = run_ranks(work, 1)
    slices = run_ranks(work, 3)
    for i in range(2):
        assert torch.equal(torch.cat([parts[i] for parts in slices]), whole[i])


def test_tokens_per_second_are_those_of_all_ranks():
    def work(cluster: Cluster) -> float:
        summary = train(cluster, "naive", steps=1, batch_size=12)
        return summary["tokens_per_second"] * summary["step_seconds"]

    for world_size in (1, 2, 3):
        assert run_ranks(work, world_size) == pytest.approx([12 * 32] * world_size)


def test_a_long_run_records_its_first_steps_only_and_counts_them_all():
    def work(cluster: Cluster) -> tuple[dict[str, Any], int]:
        with mock.patch("training.run.RECORDED_STEPS", 4):
            summary = train(cluster, "bucket", steps=9)
        return summary, [event.name for event in timeline.recorded()].count("forward")

    for summary, num_recorded in run_ranks(work, 2):
        assert (summary["steps"], summary["observed_steps"]) == (9, 2)  # two more are warm-up
        assert summary["bytes_sent"] == summary["bytes_formula"]
        assert summary["messages_sent"] == summary["messages_formula"]
        assert num_recorded == 4


def test_what_spans_cannot_tell_is_left_out_of_the_report_with_the_reason():
    def training(cluster: Cluster) -> dict[str, Any]:
        run = Run(cluster, Args(steps=2, size="tiny", batch_size=2), "test")
        run.not_measured = "no rank looked"
        model = run.model()
        for _ in range(2):
            with run.step() as record, timeline.span("forward", "forward"):
                record.loss = 1.0
        return run.finish(model)

    (summary,) = run_ranks(training, 1)
    assert [summary[name] for name in ("compute_seconds", "communication_seconds", "hidden_share")] == [
        None
    ] * 3
    assert summary["not_measured"] == "compute, communication, hidden share: no rank looked"
    assert summary["step_seconds"] > 0
