"""Test what the train script of this folder does beyond what tests/test_scripts.py asks of all scripts."""

from typing import Any

import pytest

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.run_modes import train

SHORT = ("--steps", "2", "--batch-size", "4", "--size", "tiny", "--seed", "1")


def report(cluster: Cluster, *options: str) -> dict[str, Any]:
    return train(cluster, "expert_parallel", *SHORT, *options)


def test_a_run_reports_its_bytes_and_what_the_router_has_decided():
    def reports(cluster: Cluster) -> list[dict[str, Any]]:
        dropping = ("--capacity", "1", "--balance", "bias", "--shared", "--top-k", "1")
        replicated = ("--expert-ranks", "2", "--balance", "none", "--pattern", "tree")
        return [report(cluster), report(cluster, *dropping), report(cluster, *replicated)]

    by_rank = run_ranks(reports, 4)
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
    assert len({str(reports[0]["tokens_per_expert"]) for reports in by_rank}) == 1


def test_a_run_resumes_on_another_number_of_ranks_with_its_biases(tmp_path):
    options = ("--balance", "bias", "--bias-rate", "0.01", "--shared", "--checkpoint", str(tmp_path / "new"))

    def first(cluster: Cluster) -> None:
        report(cluster, *options, "--steps", "1", "--expert-ranks", "2")

    run_ranks(first, 4)
    [in_two_parts, _] = run_ranks(lambda cluster: report(cluster, *options, "--resume"), 2)
    [in_one_go] = run_ranks(lambda cluster: report(cluster, *options[:-2]), 1)
    assert in_two_parts["last_loss"] == pytest.approx(in_one_go["last_loss"], rel=1e-5)
    assert in_two_parts["tokens_per_expert"] == in_one_go["tokens_per_expert"]


def test_invalid_arguments_are_refused_in_one_sentence(tmp_path):
    def refuse(cluster: Cluster) -> None:
        for options, sentence in (
            (
                "--experts 9 --expert-ranks 2",
                "^--experts 9: 2 ranks cannot share them equally; choose .* such as --experts 10",
            ),
            ("--experts 0", "^--experts 0: there must be at least one"),
            ("--expert-ranks 3", "^--expert-ranks 3 must divide the 2 ranks"),
            ("--top-k 9", "^--top-k 9: a token passes at least 1 and at most all 8 experts"),
            ("--capacity nan", "^--capacity nan: it is a number above 0"),
            ("--aux-weight -1", "^--aux-weight -1: it is a number from 0"),
            ("--bias-rate inf", "^--bias-rate inf: it is a number from 0"),
        ):
            with pytest.raises(WorkbookError, match=sentence):
                report(cluster, *options.split(), "--checkpoint", str(tmp_path / "new"))
        assert not (tmp_path / "new").exists()

    run_ranks(refuse, 2)
