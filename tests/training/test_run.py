"""What training.run does for all train scripts: batches, spans, the report."""

import errno
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_parallel.arguments import HybridArgs
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import RankError, run_ranks
from lab.trace import timeline
from tests.on_ranks import on_ranks
from tests.refusals import the_one_sentence
from tests.run_modes import without_measuring
from tests.training.attempts import STEPS, refusal, train
from training import checkpoint
from training.arguments import Args
from training.checkpoint import Checkpoints, complete_steps
from training.finite import not_finite
from training.run import Run
from training.state_shards import StateShard


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


@on_ranks(2)
def test_a_long_run_records_its_first_steps_only_and_counts_them_all_and_the_tokens_of_all_ranks(
    cluster: Cluster,
):
    with mock.patch("training.run.RECORDED_STEPS", 4):
        report = train(cluster, "bucket", steps=9)
    assert (report["steps"], report["observed_steps"]) == (9, 2)  # two more are warm-up
    assert report["bytes_sent"] == report["bytes_formula"]
    assert report["messages_sent"] == report["messages_formula"]
    assert [event.name for event in timeline.recorded()].count("forward") == 4
    report = train(cluster, "naive", steps=1)
    assert report["tokens_per_second"] * report["step_seconds"] == pytest.approx(12 * 32)


@on_ranks(1)
def test_what_spans_cannot_tell_is_left_out_of_the_report_with_the_reason(cluster: Cluster):
    run = Run(cluster, Args(steps=2, size="tiny", batch_size=2), "test")
    run.not_measured = "no rank looked"
    model = run.model()
    for x, _ in run.batches(model, run.optimizer(model)):
        run.record(model(x).mean())
    report = run.finish(model)
    assert not any(report[f"{name}_seconds"] for name in ("compute", "communication"))
    assert report["hidden_share"] is None and report["step_seconds"] > 0
    assert report["not_measured"] == "compute, communication, hidden share: no rank looked"


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


def masks(cluster: Cluster, seed: int = 0) -> list[tuple[float, ...]]:
    """Return a dropout mask of each of two steps."""
    drawn = []
    with without_measuring():
        run = Run(cluster, Args(steps=2, size="tiny", batch_size=12, seed=seed), "test")
        model = run.model()
        for _ in run.batches(model, run.optimizer(model)):
            drawn.append(tuple(F.dropout(torch.ones(64), 0.5).tolist()))
            run.record(torch.ones(()))
    return drawn


def test_ranks_with_examples_of_their_own_draw_different_masks():
    by_rank, again, of_another_seed = zip(
        *run_ranks(lambda cluster: [masks(cluster, seed) for seed in (0, 0, 1)], 3), strict=True
    )
    assert len({mask for of_rank in by_rank for mask in of_rank}) == 3 * 2
    assert by_rank == again
    assert not set(by_rank[0]) & set(of_another_seed[0])


def test_stages_draw_different_masks_and_ranks_that_compute_the_same_draw_the_same():
    streams = {"zero3": 2, "pipeline_1f1b": 2, "tensor_parallel": 1}

    def work(cluster: Cluster) -> dict[str, int]:
        found = {}
        for mode in streams:
            with mock.patch("training.run.seed_step") as seeding:
                train(cluster, mode, steps=1)
            [found[mode]] = {call.args[2] for call in seeding.call_args_list}
        return found

    one, other = run_ranks(work, 2)
    assert {mode: len({one[mode], other[mode]}) for mode in streams} == streams


@pytest.mark.parametrize("mode", ["naive", "zero1_textbook", "zero1", "zero2", "zero3"])
def test_the_sentence_names_parameter_step_and_rank(mode: str):
    with pytest.raises(RankError, match=r"The gradient of \S+ is not finite in step 2 on rank \d"):
        run_ranks(lambda cluster: train(cluster, mode, lr=1e30), 2)


def test_allow_nonfinite_goes_on():
    reports = run_ranks(lambda cluster: train(cluster, "naive", lr=1e30, allow_nonfinite=True), 2)
    assert [report["steps"] for report in reports] == [STEPS, STEPS]


def test_a_good_save_that_is_under_way_when_the_training_diverges_is_completed(tmp_path):
    def work(cluster: Cluster) -> str:
        def diverges(model: object, optimizer: object, step: int, rank: int) -> None:
            if step == 2:
                raise WorkbookError(f"The gradient is not finite in step {step} on rank {rank}.")

        def slowly(path: Path, tensors: dict[str, Tensor]) -> None:
            time.sleep(0.5)
            write(path, tensors)

        write = checkpoint.write_tensors
        with (
            mock.patch("training.run.refuse_not_finite", diverges),
            mock.patch.object(checkpoint, "write_tensors", slowly),
        ):
            return refusal(cluster, "hybrid", steps=3, checkpoint=tmp_path, checkpoint_every=1)

    assert "not finite in step 2 on rank 0" in run_ranks(work, 2)[0]
    assert complete_steps(tmp_path) == [1]


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_one_number_is_enough(number: float):
    whole, odd = torch.ones(5), torch.ones(2, 3, dtype=torch.float64)
    named = [("whole", whole), ("counts", torch.ones(3, dtype=torch.int64)), ("odd", odd)]
    assert not_finite(named) is None
    odd[1, 2] = number
    assert not_finite(named) == "odd"


def test_a_checkpoint_that_is_not_finite_is_not_written_and_the_good_one_stays():
    def work(cluster: Cluster) -> str:
        checkpoints, weight = Checkpoints(folder, cluster, keep=1), torch.ones(4)
        checkpoints.save(1, [StateShard("model/weight", weight)])
        weight[cluster.rank] = torch.inf
        checkpoints.save(2, [StateShard("model/weight", weight)])
        try:
            checkpoints.wait()
        except WorkbookError as refusal:
            return str(refusal)
        return "written"

    with TemporaryDirectory() as name:
        folder = Path(name)
        refusals = run_ranks(work, 2)
        assert any("model/weight has numbers that are not finite" in refusal for refusal in refusals)
        assert complete_steps(folder) == [1]
