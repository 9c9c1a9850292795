"""Test the train script of this folder as users run it: reports, checkpoints, and mistakes."""

import dataclasses
from typing import Any
from unittest import mock

import pytest

from comm.cost import Link
from expert_parallel import train_moe
from expert_parallel.train_moe import Args
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from training.run import Run


def summary(cluster: Cluster, **changes: Any) -> dict[str, Any]:
    """Return the summary of a short run of the script on this rank."""
    summaries = []
    finish = Run.finish

    def noting(self: Run, *args: Any, **extras: Any) -> dict[str, Any]:
        summaries.append(finish(self, *args, **extras))
        return summaries[-1]

    args = dataclasses.replace(Args(steps=3, batch_size=4, size="tiny", seed=1), **changes)
    with (
        mock.patch.object(Run, "finish", noting),
        mock.patch("training.run.measure_all_reduce", lambda pattern, **_: Link(1e-4, 1e-9)),
    ):
        train_moe.main(cluster, args)
    return summaries[0]


def test_a_run_reports_its_bytes_and_what_the_router_has_decided():
    def report(cluster: Cluster) -> list[dict[str, Any]]:
        return [
            summary(cluster),
            summary(cluster, capacity=1.0, balance="bias", shared=True, top_k=1),
            summary(cluster, expert_ranks=2, balance="none", pattern="tree"),
        ]

    by_rank = run_ranks(report, 4)
    for one in [one for reports in by_rank for one in reports]:
        assert one["bytes_sent"] == one["bytes_formula"] > 0
        assert one["messages_sent"] == one["messages_formula"]
        assert one["replicas_equal"]
        assert 0 < one["dispatch_bytes"] < one["bytes_sent"]
        tokens = one["tokens_per_expert"]
        assert one["imbalance"] == pytest.approx(max(tokens) / (sum(tokens) / 8), rel=1e-3)
    plain, dropping, replicated = by_rank[0]
    assert sum(plain["tokens_per_expert"]) == 4 * 32 * 2 and sum(dropping["tokens_per_expert"]) == 4 * 32
    assert plain["dropped_tokens"] == 0 < dropping["dropped_tokens"]
    assert replicated["dispatch_bytes"] < plain["dispatch_bytes"]
    for key in ("last_loss", "validation_loss", "tokens_per_expert"):
        assert len({str(reports[0][key]) for reports in by_rank}) == 1


def test_a_run_resumes_on_another_number_of_ranks(tmp_path):
    options = {"balance": "bias", "bias_rate": 0.01, "shared": True}
    folder = str(tmp_path / "checkpoint")

    def first(cluster: Cluster) -> None:
        summary(cluster, steps=2, checkpoint=folder, expert_ranks=2, **options)

    def rest(cluster: Cluster) -> dict[str, Any]:
        return summary(cluster, steps=4, checkpoint=folder, resume=True, **options)

    run_ranks(first, 4)
    in_two_parts = run_ranks(rest, 2)[0]
    in_one_go = run_ranks(lambda cluster: summary(cluster, steps=4, **options), 1)[0]
    assert in_two_parts["last_loss"] == pytest.approx(in_one_go["last_loss"], rel=1e-5)
    assert in_two_parts["tokens_per_expert"] == in_one_go["tokens_per_expert"]


def test_invalid_arguments_are_refused_in_one_sentence(tmp_path):
    def refuse(cluster: Cluster) -> None:
        for changes, sentence in (
            (
                {"experts": 9, "expert_ranks": 2},
                "^--experts 9: 2 ranks cannot share them equally; choose .* such as --experts 10",
            ),
            ({"experts": 0}, "^--experts 0: there must be at least one"),
            ({"expert_ranks": 3}, "^--expert-ranks 3 must divide the 2 ranks"),
            ({"expert_ranks": 0}, "^--expert-ranks 0 must divide the 2 ranks"),
            ({"top_k": 9}, "^--top-k 9: a token passes at least 1 and at most all 8 experts"),
            ({"top_k": 0}, "^--top-k 0: a token passes at least 1"),
            ({"capacity": 0.0}, "^--capacity 0: it is a number above 0"),
            ({"capacity": float("nan")}, "^--capacity nan: it is a number above 0"),
            ({"aux_weight": -1.0}, "^--aux-weight -1: it is a number from 0"),
            ({"bias_rate": float("inf")}, "^--bias-rate inf: it is a number from 0"),
        ):
            with pytest.raises(WorkbookError, match=sentence):
                summary(cluster, checkpoint=str(tmp_path / "new"), **changes)
        assert not (tmp_path / "new").exists()

    run_ranks(refuse, 2)
