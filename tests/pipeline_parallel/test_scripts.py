"""The train scripts, as users run them: reports, checkpoints, traces and wrong arguments."""

import dataclasses
import json
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import tyro

from comm.cost import Link
from lab import checkpoint
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import RankError, forked, run_ranks
from pipeline_parallel import (
    train_1f1b,
    train_afab,
    train_interleaved,
    train_model_parallel,
    train_zero_bubble,
)
from pipeline_parallel.run import Args, ChunkedArgs, Run
from pipeline_parallel.train_zero_bubble import ZeroBubbleArgs

forked.preload("pipeline_parallel.train_zero_bubble", "pipeline_parallel.train_interleaved")

SCRIPTS: dict[str, tuple[ModuleType, Args]] = {
    "naive": (train_model_parallel, Args()),
    "gpipe": (train_afab, Args()),
    "1f1b": (train_1f1b, Args()),
    "interleaved": (train_interleaved, ChunkedArgs()),
    "zb_h1": (train_zero_bubble, ZeroBubbleArgs()),
    "zb_v": (train_zero_bubble, ZeroBubbleArgs(schedule="zb_v")),
}


def summary(cluster: Cluster, name: str, **changes: Any) -> dict[str, Any]:
    """Return what a short run of the script reports on this rank."""
    summaries = []
    finish = Run.finish

    def noting(self: Run, *args: Any, **extras: Any) -> dict[str, Any]:
        summaries.append(finish(self, *args, **extras))
        return summaries[-1]

    script, args = SCRIPTS[name]
    short = {"steps": 3, "batch_size": 4, "microbatches": 4, "size": "tiny", "seed": 1}
    with (
        mock.patch.object(Run, "finish", noting),
        mock.patch("pipeline_parallel.run.measure_link", lambda **_: Link(1e-4, 1e-9)),
        # Ranks of one machine share its clock, and to ask over a store of files takes half a second.
        nullcontext() if "trace" in changes else mock.patch("lab.trace.timeline.align", lambda cluster: 0),
    ):
        script.main(cluster, dataclasses.replace(args, **{**short, **changes}))
    return summaries[0]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_schedule_trains_the_same_holds_what_is_predicted_and_sends_what_the_formula_says(n: int):
    def report(cluster: Cluster) -> list[dict[str, Any]]:
        runs = [summary(cluster, name) for name in SCRIPTS]
        return runs + [summary(cluster, name, model="baby_cnn") for name in ("1f1b", "zb_h1")]

    by_rank = run_ranks(report, n)
    for one in [one for of_rank in by_rank for one in of_rank]:
        assert one["bytes_sent"] == one["bytes_formula"]
        assert one["messages_sent"] == one["messages_formula"]
        assert one["replicas_equal"]
    for one in by_rank[0]:
        assert one["activations_bytes"] == one["activations_predicted_bytes"]
        assert one["microbatches_held"] == one["microbatches_held_formula"]
        assert 0 <= one["bubble"] < 1
        assert 0 <= one["bubble_formula"] < 1
        assert one["makespan_seconds"] > 0 < one["makespan_simulated_seconds"]
    text, *others = [one["last_loss"] for one in by_rank[0][: len(SCRIPTS)]]
    assert others == pytest.approx([text] * len(others), rel=1e-5)


def test_recomputation_holds_fewer_activations_and_trains_the_same():
    def report(cluster: Cluster) -> list[dict[str, Any]]:
        return [summary(cluster, name, recompute=on) for name in ("gpipe", "zb_h1") for on in (False, True)]

    reports = run_ranks(report, 2)[0]
    for plain, recomputed in (reports[:2], reports[2:]):
        assert recomputed["last_loss"] == pytest.approx(plain["last_loss"], rel=1e-5)
    assert max(reports[1]["activations_bytes"]) < 0.3 * min(reports[0]["activations_bytes"])


def test_the_metronome_replaces_computing_and_the_simulation_has_its_tick():
    def report(cluster: Cluster) -> list[dict[str, Any]]:
        return [summary(cluster, name, metronome="2ms") for name in ("1f1b", "zb_v")]

    for one in run_ranks(report, 2)[0]:
        assert one["makespan_seconds"] >= 0.95 * one["makespan_formula_seconds"]
        assert one["makespan_simulated_seconds"] == pytest.approx(one["makespan_formula_seconds"], rel=0.2)
        assert "activations_bytes" not in one
        assert one["bytes_sent"] == one["bytes_formula"]
    assert one["makespan_formula_seconds"] == pytest.approx(4 * 0.006 + 0.001)


@pytest.mark.parametrize("balance", ["time", "parameters"])
def test_stages_can_be_balanced_by_the_time_or_the_parameters_of_layers(balance: str):
    def report(cluster: Cluster) -> float:
        return summary(cluster, "1f1b", balance=balance)["last_loss"]

    balanced = run_ranks(report, 3)[0]
    assert balanced == pytest.approx(run_ranks(lambda cluster: summary(cluster, "1f1b")["last_loss"], 1)[0])


def test_a_run_goes_on_from_its_checkpoint_with_another_schedule_on_another_number_of_ranks(tmp_path):
    folder = str(tmp_path / "checkpoint")

    def first(cluster: Cluster) -> None:
        summary(cluster, "1f1b", steps=2, checkpoint=folder)

    def rest(cluster: Cluster) -> float:
        return summary(cluster, "zb_v", steps=4, checkpoint=folder, resume=True)["last_loss"]

    run_ranks(first, 4)
    in_two_parts = run_ranks(rest, 2)[0]
    in_one_go = run_ranks(lambda cluster: summary(cluster, "gpipe", steps=4)["last_loss"], 1)[0]
    assert in_two_parts == pytest.approx(in_one_go, rel=1e-5)


def test_a_checkpoint_that_lacks_what_one_stage_needs_is_refused_by_all_ranks(tmp_path):
    def run(cluster: Cluster) -> str:
        summary(cluster, "1f1b", steps=1, checkpoint=str(tmp_path))
        if cluster.is_main:
            state = checkpoint.unpack(checkpoint.read(tmp_path), "")
            del state["model"]["head.weight"]
            checkpoint.save(tmp_path, state)
        with pytest.raises(WorkbookError) as caught:
            summary(cluster, "1f1b", checkpoint=str(tmp_path), resume=True)
        return str(caught.value)

    first, last = run_ranks(run, 2, timeout=30)
    assert first == last
    assert first.startswith(f"{tmp_path} does not hold what this run saves (KeyError: 'head.weight')")


def test_a_trace_shows_a_step_measured_above_simulated_and_a_page_to_play_it(tmp_path):
    run_ranks(lambda cluster: summary(cluster, "interleaved", trace=str(tmp_path)) and None, 2)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    spans = [
        row for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if row["ph"] == "X"
    ]
    forwards = {(row["args"]["stage"], row["args"]["microbatch"]) for row in spans if row["cat"] == "forward"}
    assert forwards == {(stage, microbatch) for stage in range(4) for microbatch in range(4)}
    assert "measured interleaved" in (tmp_path / "schedules.html").read_text()


def test_arguments_that_make_no_sense_are_refused_in_a_sentence():
    def refuse(cluster: Cluster) -> None:
        for name, changes, sentence in (
            ("1f1b", {"microbatches": 3}, "--microbatches 3 must divide --batch-size 4"),
            ("1f1b", {"microbatches": 0}, "--microbatches 0: there must be at least one"),
            ("1f1b", {"layers": 0}, "--layers 0: there must be at least one"),
            ("interleaved", {"chunks": 0}, "--chunks 0: there must be at least one"),
            ("interleaved", {"chunks": 10**10}, "--chunks 10000000000: there can be at most 4096"),
            ("interleaved", {"chunks": 9}, "10 parts cannot be cut into 18 stages: take fewer ranks"),
            ("gpipe", {"model": "baby_cnn", "metronome": "20ms"}, "--metronome works with the GPT only"),
            ("gpipe", {"metronome": "soon"}, "--metronome soon: 'soon' is not a time"),
        ):
            with pytest.raises(WorkbookError, match=sentence):
                summary(cluster, name, **changes)

    run_ranks(refuse, 2)


def test_different_arguments_are_refused_and_listed_by_rank():
    def refuse(cluster: Cluster) -> None:
        for name, changes in (
            ("1f1b", {"seed": 5}),
            ("gpipe", {"microbatches": 3}),
            ("interleaved", {"chunks": 3}),
        ):
            [(option, value)] = changes.items()
            with pytest.raises(
                WorkbookError, match=f"^--{option} is .* on rank 0 and {value} on rank 1: start"
            ):
                summary(cluster, name, **(changes if cluster.rank == 1 else {}))

    run_ranks(refuse, 2, timeout=30)


@pytest.mark.parametrize("name", ["1f1b", "naive", "gpipe"])
def test_when_a_stage_is_killed_the_others_end_within_the_timeout_and_name_it(name: str):
    def run(cluster: Cluster) -> None:
        steps = 0
        step = Run.step

        def until_killed(self: Run) -> Any:
            nonlocal steps
            steps += 1
            if cluster.rank == 2 and steps == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self)

        with mock.patch.object(Run, "step", until_killed):
            summary(cluster, name, steps=5)

    first, second, killed, last = run_ranks(run, 4, timeout=30, group_timeout=10, collect_failures=True)
    assert "killed by SIGKILL" in str(killed)
    for survivor in (first, second, last):
        assert isinstance(survivor, RankError)
    # An activation or a gradient: whichever was on its way, or about to be asked for, when rank 2 died.
    assert re.search("from stage (1 to stage 2|2 to stage 1)[.] ", str(second))
    assert re.search("from stage (2 to stage 3|3 to stage 2)[.] ", str(last))
    assert "rank 2 has died or left" in str(last)


def test_microbatches_and_metronome_go_by_the_tutorials_names_too():
    for arguments in (Args, ChunkedArgs, ZeroBubbleArgs):
        args = tyro.cli(arguments, args=["--grad-acc-steps", "4", "--pseudo-computation-time", "0.5"])
        assert (args.microbatches, args.metronome) == (4, "0.5s")
        assert tyro.cli(arguments, args=["--microbatches", "2", "--metronome", "20ms"]).metronome == "20ms"


def test_the_report_of_an_ended_run_is_rank_0s(tmp_path: Path):
    one, other = run_ranks(lambda cluster: summary(cluster, "1f1b"), 2)
    assert {"bubble", "bubble_simulated", "bubble_formula", "tokens_per_second"} <= one.keys()
    assert "bubble" not in other
