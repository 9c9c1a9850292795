"""The train scripts as users run them. tests/test_scripts.py has what scripts of all lessons promise."""

import os
import signal
from unittest import mock

import pytest
import tyro

from comm.script import joined
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import forked, run_ranks
from lab.trace.gantt import Event
from lab.trace.makespan import makespan, microbatches_held
from pipeline_parallel.analysis import compare, theory
from pipeline_parallel.analysis.simulate import Costs, Simulation, simulate
from pipeline_parallel.schedules import SCHEDULES, stages_per_rank, table_of
from pipeline_parallel.train_zero_bubble import ZeroBubbleArgs
from tests.comm.places import places, set_variables
from tests.run_modes import train
from training.run import Run

forked.preload("pipeline_parallel.train_zero_bubble", "pipeline_parallel.train_interleaved")

SHORT = ("--steps", "1", "--batch-size", "4", "--microbatches", "4", "--layers", "4", "--size", "tiny")
MODES = {
    "naive": ("pipeline_model_parallel",),
    "gpipe": ("pipeline_afab",),
    "1f1b by hand": ("pipeline_1f1b_by_hand",),
    "1f1b": ("pipeline_1f1b",),
    "interleaved": ("pipeline_interleaved",),
    "zb_h1": ("pipeline_zero_bubble",),
    "zb_v": ("pipeline_zero_bubble", "--schedule", "zb_v"),
    "dualpipe_v": ("pipeline_zero_bubble", "--schedule", "dualpipe_v"),
}


def run(cluster: Cluster, name: str, *options: str) -> dict:
    mode, *own = MODES[name]
    return train(cluster, mode, *SHORT, *own, *options)


def test_a_report_has_what_the_schedule_holds_and_how_long_ranks_are_idle():
    def reports(cluster: Cluster) -> dict[str, dict]:
        found = {name: run(cluster, name) for name in MODES}
        return found | {
            f"{name} recomputed": run(cluster, name, "--recompute") for name in ("gpipe", "zb_h1")
        }

    found, other = run_ranks(reports, 2)
    for name in MODES:
        schedule = name.removesuffix(" by hand")
        held = [theory.held(schedule, 2, 4, stages_per_rank(schedule), rank) for rank in range(2)]
        assert found[name]["microbatches_held"] == held, name
        assert 0 <= found[name]["bubble"] < 1 and 0 <= found[name]["bubble_formula"] < 1
    assert "bubble" not in other["1f1b"], "the report is rank 0's"
    bytes_of = {name: max(one["activations_bytes"]) for name, one in found.items()}
    assert bytes_of["1f1b"] == bytes_of["1f1b by hand"] < 0.6 * bytes_of["gpipe"]
    assert bytes_of["gpipe recomputed"] < 0.3 * bytes_of["gpipe"]
    assert bytes_of["zb_h1 recomputed"] > 0.5 * bytes_of["zb_h1"]  # what a W needs is kept anyway
    for name in ("gpipe", "zb_h1"):
        assert found[f"{name} recomputed"]["last_loss"] == pytest.approx(found[name]["last_loss"], rel=1e-5)


def test_the_metronome_replaces_computing_and_takes_no_less_than_the_formula_and_a_slow_link_more():
    clock = ("--metronome", "2ms")

    def reports(cluster: Cluster) -> tuple[list[dict], dict]:
        slow = run(cluster, "1f1b", *clock, "--link", "1gbit,8ms")
        return [run(cluster, name, *clock) for name in MODES], slow

    fast, slow = run_ranks(reports, 2)[0]
    for name, one in zip(MODES, fast, strict=True):
        schedule = name.removesuffix(" by hand")
        formula = theory.makespan(schedule, 2, 4, stages_per_rank(schedule), 0.002, 0.002, 0.002)
        assert one["makespan_seconds"] >= 0.97 * formula, name
        assert "activations_bytes" not in one and one["first_loss"] is None
        assert one["bytes_sent"] == one["bytes_formula"]
    formula = theory.makespan("1f1b", 2, 4, 1, 0.002, 0.002, 0.002)
    assert slow["makespan_seconds"] > formula + 0.014  # an activation, and a gradient back


def test_a_trace_is_compared_with_the_simulation_the_formula_and_all_schedules(tmp_path, capsys):
    def work(cluster: Cluster) -> dict[str, str] | None:
        with mock.patch("training.report.print_report") as printed:
            run(cluster, "interleaved", "--trace", str(tmp_path), "--metronome", "2ms")
        return printed.call_args.kwargs["rows"]

    command = run_ranks(work, 2)[0]["compare by"]
    capsys.readouterr()
    [picture], [trace] = (
        tmp_path.glob("pipeline_interleaved_*.png"),
        tmp_path.glob("pipeline_interleaved_*.json"),
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert command == f"python pipeline_parallel/analysis/compare.py {tmp_path}"
    compare.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "interleaved, 2 ranks, 4 microbatches"
    assert [line.split()[0] for line in lines[2:5]] == ["measured", "simulated", "formula"]
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")
    assert "measured interleaved" in (tmp_path / "schedules.html").read_text()
    trace.write_text('{"traceEvents": []}')
    with pytest.raises(SystemExit, match="has no actions of a pipeline"):
        compare.main(tmp_path)


def test_of_a_simulated_run_the_table_its_costs_and_what_it_holds_come_back():
    costs = Costs(forward=(1.0, 2.0), input_gradient=(1.0, 3.0), weight_gradient=(1.0, 3.0))
    for name in SCHEDULES:
        stages = 2 * stages_per_rank(name)
        table = table_of(name, 2, 4)
        used = costs if stages == 2 else Costs.equal(4, 1.0, 2.0, 2.0)
        events: list[Event] = simulate(table, used).events()
        assert Simulation.measured(events).table == table
        assert compare.name_of(table) == name
        assert Costs.measured(events, stages) == used
        assert makespan(events) == simulate(table, used).makespan
        assert [microbatches_held(events, rank) for rank in range(2)] == simulate(table, used).peak_held


def test_arguments_that_make_no_sense_are_refused_in_a_sentence():
    def work(cluster: Cluster) -> None:
        for name, *options, sentence in (
            ("1f1b", "--microbatches", "3", "--microbatches 3 must divide --batch-size 4"),
            ("1f1b", "--microbatches", "0", "--microbatches 0: there must be at least 1"),
            ("interleaved", "--chunks", "10000000000", "--chunks 10000000000: .* at most 4096"),
            ("interleaved", "--chunks", "10", "6 parts cannot be cut into 20 stages: take fewer ranks"),
            ("gpipe", "--model", "baby_cnn", "--metronome", "20ms", "--metronome works with the GPT only"),
            ("gpipe", "--metronome", "soon", "--metronome soon: 'soon' is not a time"),
        ):
            with pytest.raises(WorkbookError, match=sentence):
                run(cluster, name, *options)

    run_ranks(work, 2)


def train_until_one_dies(cluster: Cluster, environments: list[dict[str, object]]) -> None:
    set_variables(environments[cluster.rank])
    steps, next_batch = 0, Run._next_batch

    def until_it_dies(self: Run, step: int):
        nonlocal steps
        steps += 1
        if cluster.rank == 2 and steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_batch(self, step)

    with mock.patch.object(Run, "_next_batch", until_it_dies), joined() as place:
        run(place, "1f1b", "--steps", "5")


def test_a_rank_that_dies_is_named_by_all_others_at_once_and_not_their_neighbour(capfd):
    environments = places([0, 1, 2, 3], 4, JOIN_TIMEOUT=50, OP_TIMEOUT=50)
    options = {"backend": None, "collect_failures": True, "timeout": 30}
    run_ranks(train_until_one_dies, 4, environments, **options)
    lines = capfd.readouterr().err.splitlines()
    for rank in (0, 1, 3):
        died = [line for line in lines if line.startswith(f"[rank {rank}]") and "rank 2 has died" in line]
        assert died, (rank, lines)


def test_microbatches_and_metronome_go_by_the_tutorials_names_too():
    args = tyro.cli(ZeroBubbleArgs, args=["--grad-acc-steps", "4", "--pseudo-computation-time", "0.5"])
    assert (args.microbatches, args.metronome) == (4, "0.5s")
    assert tyro.cli(ZeroBubbleArgs, args=["--metronome", "20ms"]).metronome == "20ms"
