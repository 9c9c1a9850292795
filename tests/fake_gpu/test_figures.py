"""Test that reported figures measure the GPU, not the host, if each operation takes 10 ms."""

import pytest

from tests.fake_gpu.ranks import SHORT, run_script

SECONDS = 0.01
SLOW = {"FAKE_SLOW": str(SECONDS)}


def test_naive_hides_no_communication_and_its_step_includes_all_of_it():
    figures = run_script("data_parallel/train_naive.py", *SHORT, **SLOW)
    operations = figures["messages_sent"] / figures["steps"] / 2  # a ring of two sends two messages for each
    assert figures["step_seconds"] >= figures["compute_seconds"] + 0.99 * operations * SECONDS
    assert figures["hidden_share"] < 0.05
    assert figures["predicted_step_seconds"] >= 0.99 * operations * SECONDS


def test_communication_beside_the_backward_is_hidden():
    figures = run_script("data_parallel/train_overlap.py", *SHORT, "--metronome", "200ms", **SLOW)
    assert figures["hidden_share"] > 0.3
    assert figures["compute_seconds"] >= 0.2 * 3 * 2  # two layers


@pytest.mark.parametrize("script", ["train_1f1b.py", "train_afab.py"])
def test_a_metronomes_pass_begins_when_its_message_has_arrived(script: str):
    figures = run_script(f"pipeline_parallel/{script}", *SHORT, "--metronome", "20ms", **SLOW)
    busy = 8 * 3 * 0.02  # of a rank: 8 microbatches, with a forward and two gradients each
    assert figures["makespan_seconds"] > busy / (1 - figures["bubble_formula"]) + 2 * SECONDS
    assert figures["step_seconds"] >= figures["makespan_seconds"]


def test_figures_that_spans_cannot_show_are_left_out_with_the_reason():
    figures = run_script("zero/train_fsdp.py", *SHORT)
    assert figures["compute_seconds"] is figures["hidden_share"] is None
    assert "streams of its own" in figures["not_measured"]
