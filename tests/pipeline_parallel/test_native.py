"""PyTorch's schedules train our stages as one process does, and send by comm what the formula says."""

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import tyro
from torch import nn

from comm.cost import Link
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import forked, run_ranks
from lab.trace.ledger import LEDGER, Traffic
from pipeline_parallel import train_1f1b, train_torch_pipelining
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.run import Args, Run
from pipeline_parallel.schedules import table_of
from pipeline_parallel.train_torch_pipelining import TorchSchedule, by_comm
from tests.pipeline_parallel.equivalence import (
    RTOL,
    Batch,
    cnn,
    gpt,
    gradients_of,
    images,
    only,
    own_gradients,
    text,
)

forked.preload("pipeline_parallel.train_torch_pipelining", "pipeline_parallel.train_1f1b")

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")


def compare_with_one_process(
    cluster: Cluster, name: str, make: Callable[[], nn.Module], batch: Batch, microbatches: int
) -> None:
    """Compare loss and every gradient of two steps, and what they send; in the second by_comm is over."""
    (x, y), reference = batch, make()
    what = f"{name}, {type(reference).__name__} on {cluster.world_size} ranks"
    example = x[: len(x) // microbatches]
    pipeline = Pipeline(make(), table_of(name, cluster.world_size, microbatches), loss_of, example)
    native = TorchSchedule(pipeline, name, loss_of, example)
    expected = loss_of(reference(x), y)
    expected.backward()
    for is_by_comm in (True, False):
        pipeline.zero_grad()
        before = LEDGER.total()
        with by_comm(pipeline.table) if is_by_comm else nullcontext():
            outcome = native.step(x, y)
        of_step = LEDGER.total() - before
        pipeline.finish_gradient_sync()
        if is_by_comm:
            sent, formula = LEDGER.total() - before, pipeline.traffic_per_step()
            assert sent == formula, f"{what}: {sent}, and {formula}"
        else:
            assert of_step == Traffic(), f"{what}: {of_step} counted of what torch sends itself"
        if pipeline.rank_of[max(pipeline.rank_of)] == cluster.rank:
            assert_same({"loss": outcome.loss}, {"loss": expected.detach()}, RTOL, f"loss, {what},")
        mine = own_gradients(pipeline)
        assert_same(mine, only(gradients_of(reference), mine), RTOL, f"gradient, {what},")


@pytest.mark.parametrize("n", [1, 2])
def test_every_gradient_is_that_of_one_process(n: int):
    def compare(cluster: Cluster) -> None:
        for name in SCHEDULES:
            compare_with_one_process(cluster, name, lambda: gpt(num_layers=4), text(8), 4)
            if n > 1:  # an output between its stages is a view
                compare_with_one_process(cluster, name, cnn, images(8), 4)

    run_ranks(compare, n)


def test_every_gradient_is_that_of_one_process_on_four_ranks():
    def compare(cluster: Cluster) -> None:
        for name in SCHEDULES:
            compare_with_one_process(cluster, name, lambda: gpt(num_layers=8), text(8), 8)

    run_ranks(compare, 4)


def summary(cluster: Cluster, script: Any, args: Args, **changes: Any) -> dict[str, Any]:
    """Return what a short run of the script reports on this rank."""
    summaries = []
    finish = Run.finish

    def noting(self: Run, *args: Any, **extras: Any) -> dict[str, Any]:
        summaries.append(finish(self, *args, **extras))
        return summaries[-1]

    short = {"steps": 3, "batch_size": 4, "microbatches": 4, "size": "tiny", "layers": 4, "seed": 1}
    with (
        mock.patch.object(Run, "finish", noting),
        mock.patch("pipeline_parallel.run.measure_link", lambda **_: Link(1e-4, 1e-9)),
    ):
        script.main(cluster, dataclasses.replace(args, **{**short, **changes}))
    return summaries[0]


def native(cluster: Cluster, **changes: Any) -> dict[str, Any]:
    return summary(cluster, train_torch_pipelining, train_torch_pipelining.Args(), **changes)


def test_a_run_ends_where_ours_does_and_sends_what_the_formula_says():
    def report(cluster: Cluster) -> list[dict[str, Any]]:
        runs = [native(cluster, schedule=name) for name in SCHEDULES]
        runs.append(native(cluster, model="baby_cnn", link="1gbit"))
        return [*runs, *(summary(cluster, train_1f1b, Args(model=m)) for m in ("gpt", "baby_cnn"))]

    by_rank = run_ranks(report, 2)
    *runs, text, images = by_rank[0]
    for one in itertools.chain(*by_rank):
        assert one["bytes_sent"] == one["bytes_formula"] > 0
        assert one["messages_sent"] == one["messages_formula"] > 0
        assert one["replicas_equal"]
    for one, ours in [*((one, text) for one in runs[:-1]), (runs[-1], images)]:
        assert one["last_loss"] == pytest.approx(ours["last_loss"], rel=1e-5)
        assert 0 <= one["bubble"] < 1
        assert max(one["activations_bytes"]) > 0


def test_a_run_goes_on_from_the_checkpoint_of_a_schedule_of_ours(tmp_path):
    folder = str(tmp_path / "checkpoint")

    def run(cluster: Cluster) -> tuple[float, float]:
        summary(cluster, train_1f1b, Args(), steps=1, checkpoint=folder)
        rest = native(cluster, schedule="zb_v", steps=2, checkpoint=folder, resume=True)
        return rest["last_loss"], native(cluster, steps=2)["last_loss"]

    in_two_parts, in_one_go = run_ranks(run, 2)[0]
    assert in_two_parts == pytest.approx(in_one_go, rel=1e-5)


def test_what_is_not_for_pytorchs_schedules_is_refused_in_one_sentence():
    def refuse(cluster: Cluster) -> None:
        for changes, sentence in (
            ({"microbatches": 2}, r"PyTorch's 1f1b refuses: Number of microbatches \(2\) must be greater"),
            ({"schedule": "interleaved", "batch_size": 7, "microbatches": 7}, "of the number of rounds"),
            ({"schedule": "zb_h1", "batch_size": 7, "microbatches": 7}, "of the number of rounds"),
        ):
            with pytest.raises(WorkbookError, match=sentence) as refusal:
                native(cluster, **changes)
            assert "\n" not in str(refusal.value)

    run_ranks(refuse, 3)


def test_what_is_not_for_pytorchs_schedules_is_not_offered(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(train_torch_pipelining.Args, args=["--help"])
    offered = capsys.readouterr().out
    assert "--schedule" in offered and "--metronome" not in offered and "--recompute" not in offered
