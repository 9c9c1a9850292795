"""Test what the train scripts of this folder do beyond what tests/test_scripts.py asks of all scripts."""

from typing import Any

import pytest
import torch

from context_parallel.sequence_cut import documents_of
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.run_modes import train

SHORT = ("--steps", "2", "--batch-size", "2", "--size", "tiny", "--seed", "1", "--length", "20")


def report(cluster: Cluster, mode: str, *options: str) -> dict[str, Any]:
    found = train(cluster, mode, *SHORT, *options)
    assert found["bytes_sent"] == found["bytes_formula"] and found["replicas_equal"]
    assert found["messages_sent"] == found["messages_formula"]
    return found


def test_documents_change_the_loss_and_cuts_kernels_attentions_and_ranks_do_not():
    def losses(cluster: Cluster) -> list[list[float]]:
        textbook = ("--cut", "contiguous", "--kernel", "textbook", "--pattern", "tree")
        rings = [report(cluster, "context_ring"), report(cluster, "context_ring", *textbook)]
        documents = [report(cluster, f"context_{how}", "--documents") for how in ("ring", "all_to_all")]
        return [[one["last_loss"] for one in group] for group in (rings, documents)]

    [[rings, documents]], [on_two, *_] = run_ranks(losses, 1), run_ranks(losses, 2)
    for found, expected in zip(on_two, (rings, documents), strict=True):
        assert [*found, *expected] == pytest.approx([expected[0]] * 4, rel=1e-5)
    assert documents[0] != pytest.approx(rings[0], rel=1e-5)


def test_under_the_metronome_messages_are_those_of_training_and_nothing_is_trained():
    def run(cluster: Cluster) -> None:
        trained = report(cluster, "context_ring", "--cut", "contiguous")
        clocked = report(cluster, "context_ring", "--cut", "contiguous", "--metronome", "4ms")
        assert clocked["bytes_sent"] == trained["bytes_sent"] > 0
        assert clocked["last_loss"] is None

    run_ranks(run, 3)


def test_a_document_begins_after_an_empty_line():
    tokens = torch.tensor([list(b"\n\na\n\n\nbc\nd\n\ne")])
    assert documents_of(tokens).tolist() == [[0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3]]
    both = torch.tensor([list(b"ab\n\ncd"), list(b"\n\n\n\nab")])
    assert documents_of(both).tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]


def test_invalid_arguments_are_refused_in_one_sentence_on_all_ranks(tmp_path):
    folder = tmp_path / "new"

    def refuse(cluster: Cluster) -> None:
        heads = "4 heads of keys and values cannot be divided among 3 ranks equally: choose a number of ranks"
        for mode, length, sentence in (
            ("context_ring", "0", "^--length 0: a sequence has 1 to 1048576 tokens.$"),
            ("context_all_to_all", "2097152", "^--length 2097152: a sequence has 1 to"),
        ):
            with pytest.raises(WorkbookError, match=sentence):
                report(cluster, mode, "--length", length, "--checkpoint", str(folder))
        assert not folder.exists()
        with pytest.raises(WorkbookError, match=heads):
            report(cluster, "context_all_to_all", "--length", "20")

    run_ranks(refuse, 3)
