"""What training.run does for all train scripts: batches, spans, the report."""

import errno
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybrid_parallel.arguments import HybridArgs
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace import timeline
from tests.training.attempts import refusal, the_one_sentence, train
from training.arguments import Args
from training.run import Run


def test_replicas_that_end_unequal_in_a_bit_are_an_error_after_the_report(capfd):
    def work(cluster: Cluster) -> str:
        def drifting(self: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1 + 1e-6 * (cluster.rank == 1))

        with mock.patch.object(Run, "optimizer", drifting):
            return refusal(cluster, "naive")

    sentence = the_one_sentence(run_ranks(work, 3))
    assert "replicas are not equal after the last step (rank 1 differs from rank 0)" in sentence
    line = capfd.readouterr().out.splitlines()[-1]
    assert json.loads(line[line.index("{") :])["replicas_equal"] is False


def test_the_slices_of_all_ranks_are_the_batch_of_one():
    def work(cluster: Cluster) -> list[Tensor]:
        arguments = (HybridArgs(size="tiny", batch_size=12, model=model) for model in ("gpt", "mlp"))
        runs = (Run(cluster, args, "batches") for args in arguments)
        return [part for run in runs for part in run.batch(3)]

    [whole] = run_ranks(work, 1)
    for full, *slices in zip(whole, *run_ranks(work, 3), strict=True):
        assert torch.equal(torch.cat(slices), full)


def test_a_long_run_records_its_first_steps_only_and_counts_them_all_and_the_tokens_of_all_ranks():
    def work(cluster: Cluster) -> None:
        with mock.patch("training.run.RECORDED_STEPS", 4):
            report = train(cluster, "bucket", steps=9)
        assert (report["steps"], report["observed_steps"]) == (9, 2)  # two more are warm-up
        assert report["bytes_sent"] == report["bytes_formula"]
        assert report["messages_sent"] == report["messages_formula"]
        assert [event.name for event in timeline.recorded()].count("forward") == 4
        report = train(cluster, "naive", steps=1)
        assert report["tokens_per_second"] * report["step_seconds"] == pytest.approx(12 * 32)

    run_ranks(work, 2)


def test_what_spans_cannot_tell_is_left_out_of_the_report_with_the_reason():
    def work(cluster: Cluster) -> None:
        run = Run(cluster, Args(steps=2, size="tiny", batch_size=2), "test")
        run.not_measured = "no rank looked"
        model = run.model()
        for x, _ in run.batches(model, run.optimizer(model)):
            run.record(model(x).mean())
        report = run.finish(model)
        assert not any(report[f"{name}_seconds"] for name in ("compute", "communication"))
        assert report["hidden_share"] is None and report["step_seconds"] > 0
        assert report["not_measured"] == "compute, communication, hidden share: no rank looked"

    run_ranks(work, 1)


def test_a_trace_that_cannot_be_written_is_one_sentence_on_all_ranks_and_leaves_no_cut_file(tmp_path: Path):
    def work(cluster: Cluster) -> str:
        def fill_the_disk(path: Path, *_: object) -> None:
            Path(path).write_text("a part of")
            raise OSError(errno.ENOSPC, "No space left on device")

        with mock.patch.object(timeline, "write_chrome_trace", fill_the_disk):
            return refusal(cluster, "naive", trace=tmp_path)

    sentence = the_one_sentence(run_ranks(work, 2))
    assert sentence == f"cannot write the trace in {tmp_path}: No space left on device"
    assert list(tmp_path.iterdir()) == []
