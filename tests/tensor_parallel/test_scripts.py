"""Test the train scripts of this folder as users run them: reports, checkpoints, and mistakes."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import tyro

import training.run
from comm.cost import Link
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tensor_parallel import train_dtensor, train_sequence_parallel, train_tensor_parallel
from tensor_parallel.run import Args, Run

SCRIPTS = {"tensor_parallel": train_tensor_parallel, "sequence_parallel": train_sequence_parallel}


def summary(cluster: Cluster, name: str, **changes: Any) -> dict[str, Any]:
    """Return the summary of a short run of the script on this rank."""
    summaries = []
    finish = Run.finish

    def noting(self: Run, *args: Any, **extras: Any) -> dict[str, Any]:
        summaries.append(finish(self, *args, **extras))
        return summaries[-1]

    args = dataclasses.replace(Args(steps=3, batch_size=2, size="tiny", seed=1), **changes)
    with (
        mock.patch.object(Run, "finish", noting),
        mock.patch("training.run.measure_all_reduce", lambda pattern, **_: Link(1e-4, 1e-9)),
    ):
        SCRIPTS[name].main(cluster, args)
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


def test_trees_carry_all_traffic_if_they_are_chosen():
    def report(cluster) -> None:
        for name in SCRIPTS:
            one = summary(cluster, name, pattern="tree")
            assert (one["pattern"], one["replicas_equal"]) == ("tree", True)
            for what in ("bytes", "messages"):
                assert one[f"{what}_sent"] == one[f"{what}_formula"] > 0, name

    run_ranks(report, 4)


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


def test_invalid_arguments_are_refused_in_one_sentence(tmp_path):
    def refuse(cluster) -> None:
        for changes, sentence in (
            ({"size": "24heads", "clip": 0.0}, "--clip 0: the largest norm is a number above 0"),
            ({"size": "24heads", "steps": 0}, "--steps 0: there must be at least one"),
        ):
            with pytest.raises(WorkbookError, match=sentence):
                summary(cluster, "tensor_parallel", **changes)
        with pytest.raises(
            WorkbookError,
            match=r"^--size tiny: its 4 heads cannot be divided among 3 ranks equally; take --size 24heads",
        ):
            summary(cluster, "sequence_parallel", checkpoint=str(tmp_path / "new"))
        assert not (tmp_path / "new").exists()

    run_ranks(refuse, 3)


def test_different_arguments_are_refused_and_listed_by_rank():
    def refuse(cluster) -> None:
        for name, changes in (("tensor_parallel", {"lr": 0.1}), ("sequence_parallel", {"clip": -1.0})):
            [(option, value)] = changes.items()
            with pytest.raises(
                WorkbookError, match=f"^--{option} is .* on rank 0 and {value} on rank 1: start"
            ):
                summary(cluster, name, **(changes if cluster.rank == 1 else {}))

    run_ranks(refuse, 2, timeout=30)


def test_dtensor_sends_what_the_formula_says_and_ends_with_our_loss():
    def run(cluster) -> None:
        ours = summary(cluster, "tensor_parallel")
        for sequence_parallel in (False, True):
            args = train_dtensor.Args(steps=3, batch_size=2, size="tiny", seed=1)
            returned: list[dict[str, Any]] = []
            finish = training.run.Run.finish
            with (
                mock.patch.object(
                    training.run.Run, "finish", lambda *a, **k: returned.append(finish(*a, **k))
                ),
                mock.patch("training.run.measure_all_reduce", lambda pattern, **_: Link(1e-4, 1e-9)),
            ):
                train_dtensor.main(cluster, dataclasses.replace(args, sequence_parallel=sequence_parallel))
            [theirs] = returned
            assert theirs["bytes_sent"] == theirs["bytes_formula"] > 0
            assert theirs["replicas_equal"]
            assert theirs["last_loss"] == pytest.approx(ours["last_loss"], rel=1e-4)

    run_ranks(run, 2)


@pytest.mark.parametrize(
    "args, missing",
    [(Args, ["metronome"]), (train_dtensor.Args, ["metronome", "checkpoint", "resume"])],
    ids=["ours", "native"],
)
def test_a_script_offers_only_the_options_that_it_supports(args, missing: list[str], capsys):
    with pytest.raises(SystemExit):
        tyro.cli(args, args=["--help"])
    offered = capsys.readouterr().out
    assert "--steps" in offered and not [name for name in missing if f"--{name}" in offered]
