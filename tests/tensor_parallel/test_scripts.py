"""Test the train scripts of this folder as users run them: reports, checkpoints, and mistakes."""

import dataclasses
from typing import Any
from unittest import mock

import pytest

from comm.cost import Link
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tensor_parallel import train_dtensor, train_sequence_parallel, train_tensor_parallel
from training.run import Run

SCRIPTS = {"tensor_parallel": train_tensor_parallel, "sequence_parallel": train_sequence_parallel}


def summary(cluster: Cluster, name: str, **changes: Any) -> dict[str, Any]:
    """Return the summary of a short run of the script on this rank."""
    summaries = []
    finish = Run.finish

    def noting(self: Run, *args: Any, **extras: Any) -> dict[str, Any]:
        summaries.append(finish(self, *args, **extras))
        return summaries[-1]

    script = SCRIPTS.get(name, train_dtensor)
    args = dataclasses.replace(script.Args(steps=3, batch_size=2, size="tiny", seed=1), **changes)
    with (
        mock.patch.object(Run, "finish", noting),
        mock.patch("training.run.measure_all_reduce", lambda pattern, **_: Link(1e-4, 1e-9)),
    ):
        script.main(cluster, args)
    return summaries[0]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_bytes_sent_equal_the_formulas_for_a_block_and_for_the_run(n: int):
    def report(cluster) -> list[dict[str, Any]]:
        return [
            summary(cluster, name, clip=clip, overlap=overlap)
            for name in SCRIPTS
            for clip, overlap in ((None, True), (1.0, True), (None, False))
        ]

    for one in [one for by_rank in run_ranks(report, n) for one in by_rank]:
        assert one["bytes_sent"] == one["bytes_formula"]
        assert one["messages_sent"] == one["messages_formula"]
        assert one["block_bytes"] == one["block_bytes_formula"]
        assert (one["block_bytes"] > 0) == (n > 1)
        assert one["replicas_equal"]


def test_sequence_parallelism_keeps_fewer_activations():
    def kept(cluster) -> list[int]:
        return [summary(cluster, name, steps=1)["activations_bytes"] for name in SCRIPTS]

    full, by_tokens = run_ranks(kept, 4)[0]
    assert by_tokens < 0.7 * full


def test_a_run_resumes_on_another_number_of_ranks_and_in_the_other_mode(tmp_path):
    folder = str(tmp_path / "checkpoint")

    def first(cluster) -> None:
        summary(cluster, "tensor_parallel", steps=2, checkpoint=folder)

    def rest(cluster) -> float:
        return summary(cluster, "sequence_parallel", steps=4, checkpoint=folder, resume=True)["last_loss"]

    run_ranks(first, 4)
    in_two_parts = run_ranks(rest, 2)[0]
    in_one_go = run_ranks(lambda cluster: summary(cluster, "tensor_parallel", steps=4)["last_loss"], 1)[0]
    assert in_two_parts == pytest.approx(in_one_go, rel=1e-5)


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused_before_there_is_a_trace(tmp_path):
    def refuse(cluster) -> None:
        for name in (*SCRIPTS, "native"):
            folder = {} if name == "native" else {"checkpoint": str(tmp_path / "new")}
            sentence = "4 heads of --size tiny cannot be divided among 3 ranks equally; --size 24heads takes"
            with pytest.raises(WorkbookError, match=f"^{sentence}"):
                summary(cluster, name, **folder)
        assert not (tmp_path / "new").exists()

    run_ranks(refuse, 3)


def test_dtensor_sends_what_the_formula_says_and_ends_with_our_loss():
    def run(cluster) -> None:
        ours = summary(cluster, "tensor_parallel")
        for sequence_parallel in (False, True):
            theirs = summary(cluster, "native", sequence_parallel=sequence_parallel)
            assert theirs["bytes_sent"] == theirs["bytes_formula"] > 0
            assert theirs["replicas_equal"]
            for loss in ("last_loss", "validation_loss"):
                assert theirs[loss] == pytest.approx(ours[loss], rel=1e-4)

    run_ranks(run, 2)
