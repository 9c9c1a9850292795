"""Test what the train scripts of this folder do beyond what tests/test_scripts.py asks of all scripts."""

from typing import Any

import pytest

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.run_modes import train

SCRIPTS = ("tensor_parallel", "sequence_parallel")


def summary(cluster: Cluster, name: str, **changes: Any) -> dict[str, Any]:
    """Return the report of a short run on this rank; `changes` are options of the command line."""
    options = {"steps": 2, "batch_size": 2, "size": "tiny", "seed": 1} | changes
    words: list[str] = []
    for option, value in options.items():
        flag = option.replace("_", "-")
        is_flag = isinstance(value, bool)
        words += [f"--{flag}" if value else f"--no-{flag}"] if is_flag else [f"--{flag}", str(value)]
    return train(cluster, name, *words)


def test_bytes_sent_equal_the_formulas_for_a_block_and_for_the_run():
    n = 4

    def report(cluster: Cluster) -> list[dict[str, Any]]:
        variants: tuple[dict[str, Any], ...] = ({}, {"overlap": False, "clip": 1.0})
        return [summary(cluster, name, steps=1, **options) for name in SCRIPTS for options in variants]

    for by_rank in run_ranks(report, n):
        for one in by_rank:
            assert one["bytes_sent"] == one["bytes_formula"]
            assert one["messages_sent"] == one["messages_formula"]
            assert one["block_bytes"] == one["block_bytes_formula"]
        all_reduce = 2 * (n - 1) * 2 * 32 * 32 * 4 // n  # of 2 windows of 32 tokens, of width 32
        # Of sequence parallel's two variants the first one, with overlap, gathers the inputs again.
        times = [one["block_bytes"] / all_reduce for one in by_rank]
        assert times == [4, 4, 5, 4]
        assert by_rank[2]["activations_bytes"] < 0.7 * by_rank[0]["activations_bytes"]


def test_a_run_resumes_in_the_other_mode_and_dtensors_end_with_the_same_loss(tmp_path):
    folder = str(tmp_path / "checkpoint")

    def work(cluster: Cluster) -> None:
        summary(cluster, "tensor_parallel", steps=1, checkpoint=folder)
        resumed = summary(cluster, "sequence_parallel", checkpoint=folder, resume=True)
        native = summary(cluster, "tensor_parallel_native", sequence_parallel=True)
        in_one_go = summary(cluster, "tensor_parallel")["last_loss"]
        assert resumed["last_loss"] == pytest.approx(in_one_go, rel=1e-5)
        assert native["last_loss"] == pytest.approx(in_one_go, rel=1e-4)
        assert native["bytes_sent"] == native["bytes_formula"] > 0

    run_ranks(work, 2)


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused():
    def refuse(cluster: Cluster) -> None:
        for name in (*SCRIPTS, "tensor_parallel_native"):
            sentence = "4 query heads cannot be divided among 3 ranks equally; --size 24heads takes"
            with pytest.raises(WorkbookError, match=f"^{sentence}"):
                summary(cluster, name)

    run_ranks(refuse, 3)
