"""Test the train scripts of this folder as users run them: reports, checkpoints, and mistakes."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from comm.cost import Link
from context_parallel import train_all_to_all_attention, train_ring_attention
from context_parallel.sequence_cut import documents_of
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from training.run import Run

SCRIPTS = {"context_ring": train_ring_attention, "context_all_to_all": train_all_to_all_attention}
DEFAULTS = {"steps": 3, "batch_size": 2, "size": "tiny", "seed": 1, "length": 40}


def summary(cluster: Cluster, name: str, **changes: Any) -> dict[str, Any]:
    """Return the summary of a short run of the script on this rank."""
    summaries = []
    finish = Run.finish

    def noting(self: Run, *args: Any, **extras: Any) -> dict[str, Any]:
        summaries.append(finish(self, *args, **extras))
        return summaries[-1]

    args = SCRIPTS[name].Args(**{**DEFAULTS, **changes})
    with (
        mock.patch.object(Run, "finish", noting),
        mock.patch("training.run.measure_all_reduce", lambda pattern, **_: Link(1e-4, 1e-9)),
    ):
        SCRIPTS[name].main(cluster, args)
    return summaries[0]


# What a user chooses, by a name.
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("context_ring", {}),
    "textbook ring": ("context_ring", {"cut": "contiguous", "kernel": "textbook", "pattern": "tree"}),
    "all-to-all": ("context_all_to_all", {}),
    "ring, documents": ("context_ring", {"documents": True}),
    "all-to-all, documents": ("context_all_to_all", {"documents": True}),
}


def reports(cluster: Cluster, **changes: Any) -> dict[str, dict[str, Any]]:
    return {
        choice: summary(cluster, name, **options, **changes) for choice, (name, options) in CHOICES.items()
    }


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, dict[str, Any]]:
    return run_ranks(reports, 1)[0]


@pytest.mark.parametrize("n", [2, 4])
def test_every_choice_trains_as_one_process_and_sends_what_the_formulas_say(n: int, of_one_process):
    for by_choice in run_ranks(reports, n):
        for choice, one in by_choice.items():
            assert one["replicas_equal"], choice
            for what in ("bytes", "messages"):
                assert one[f"{what}_sent"] == one[f"{what}_formula"] > 0, (choice, what)
            for what in ("first_loss", "last_loss", "validation_loss"):
                expected = of_one_process[choice][what]
                assert one[what] == pytest.approx(expected, rel=1e-4), (choice, what)
            assert one["activations_bytes"] < of_one_process[choice]["activations_bytes"] * 1.5 / n, choice


def test_documents_change_the_loss_and_cuts_kernels_and_attentions_do_not(of_one_process):
    losses = {choice: one["last_loss"] for choice, one in of_one_process.items()}
    assert losses["textbook ring"] == pytest.approx(losses["ring"], rel=1e-5)
    assert losses["all-to-all"] == pytest.approx(losses["ring"], rel=1e-5)
    assert losses["all-to-all, documents"] == pytest.approx(losses["ring, documents"], rel=1e-5)
    assert losses["ring, documents"] != pytest.approx(losses["ring"], rel=1e-5)


def test_under_the_metronome_messages_are_those_of_training_and_nothing_is_trained():
    def run(cluster: Cluster) -> dict[str, Any]:
        trained = summary(cluster, "context_ring", cut="contiguous")
        clocked = summary(cluster, "context_ring", cut="contiguous", metronome="4ms")
        for what in ("bytes", "messages"):
            assert clocked[f"{what}_sent"] == clocked[f"{what}_formula"] == trained[f"{what}_sent"] > 0
        assert clocked["last_loss"] is None and clocked["replicas_equal"]
        return clocked

    run_ranks(run, 3)


def test_a_document_begins_after_an_empty_line():
    tokens = torch.tensor([list(b"\n\na\n\n\nbc\nd\n\ne")])
    assert documents_of(tokens).tolist() == [[0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3]]
    both = torch.tensor([list(b"ab\n\ncd"), list(b"\n\n\n\nab")])
    assert documents_of(both).tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]


def test_invalid_arguments_are_refused_in_one_sentence_on_all_ranks_before_the_first_step(tmp_path: Path):
    folder = tmp_path / "new"

    def refuse(cluster: Cluster) -> list[str]:
        sentences = []
        for name, changes in (
            ("context_ring", {"length": 0}),
            ("context_all_to_all", {"length": -1}),
            ("context_ring", {"length": 1 << 21}),
            ("context_all_to_all", {}),
        ):
            with pytest.raises(WorkbookError) as error:
                summary(cluster, name, checkpoint=str(folder), **changes)
            sentences.append(str(error.value))
        assert not folder.exists()
        return sentences

    first, *others = run_ranks(refuse, 3)
    assert first == others[0] == others[1]
    assert first[0] == "--length 0: a sequence has 1 to 1048576 tokens."
    assert first[1].startswith("--length -1: ") and first[2].startswith("--length 2097152: ")
    assert first[3] == (
        "All-to-all attention divides heads, and 4 heads of keys and values cannot be divided among 3 ranks "
        "equally: choose a number of ranks that divides 4, or ring attention."
    )
