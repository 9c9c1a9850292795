"""Ranks really hold as many microbatches as the schedule says, and as many bytes as the simulator says."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from pipeline_parallel.actions import Table, placement
from pipeline_parallel.activations import ActivationWatch
from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.messages import has_split_backward
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.report import RankFigures
from pipeline_parallel.schedules import stages_per_rank, table_of
from tests.pipeline_parallel.equivalence import ALL_SCHEDULES, gpt, mlp, text, vectors
from tests.pipeline_parallel.test_simulate import any_table, num_stages


class Case(NamedTuple):
    """A run to watch."""

    what: str
    table: Table
    layers: int
    recompute: bool = False


def watched(pipeline: Pipeline, x: Tensor, y: Tensor) -> ActivationWatch:
    watch = pipeline.executor.watch = ActivationWatch()
    watch.ignore(pipeline.parameters())
    pipeline.step(x, y)
    watch.update_peak()
    assert not any(watch._alive(place) for place in watch._noted), "something is still held"
    return watch


def seen_in(cases: list[Case], n: int, make=mlp, batch_of=vectors, rows: int = 3) -> list[list[RankFigures]]:
    """What each rank saw, for each case."""

    def measure(cluster: Cluster) -> list[RankFigures]:
        found = []
        for case in cases:
            microbatches = 1 + max(action.microbatch for action in case.table[0])
            x, y = batch_of(rows * microbatches)
            model = make(case.layers)
            pipeline = Pipeline(model, case.table, loss_of, x[:rows], recompute=case.recompute)
            found.append(RankFigures.of(watched(pipeline, x, y), {}))
        return found

    return list(zip(*run_ranks(measure, n), strict=True))


def predicted(table: Table, seen: list[RankFigures]) -> list[int]:
    """The simulator's peak, in bytes, of each rank, from what one microbatch leaves in each stage."""
    stages = range(num_stages(table))
    by_forward = {stage: size for one in seen for stage, size in one.kept_by_forward.items()}
    for_weight = {stage: size for one in seen for stage, size in one.kept_for_weight.items()}
    simulation = simulate(table, Costs.equal(len(stages), 1, 1, 1))
    return simulation.peak_bytes([by_forward[s] for s in stages], [for_weight.get(s, 0) for s in stages])


def assert_as_predicted(case: Case, seen: list[RankFigures], held: list[int]) -> None:
    """In bytes somewhat less may be held where neighbouring stages of a rank with split backwards share what
    is one's output and the other's input: it stays for some microbatches longer than for others."""
    in_bytes, rank_of = predicted(case.table, seen), placement(case.table)
    sharing = {rank for stage, rank in rank_of.items() if rank_of.get(stage + 1) == rank}
    for rank, one in enumerate(seen):
        where = f"{case.what}, rank {rank}: {one.peak_bytes} bytes, and {in_bytes[rank]} predicted"
        if rank in sharing and has_split_backward(case.table):
            assert 0.8 * in_bytes[rank] <= one.peak_bytes <= in_bytes[rank], where
        else:
            assert one.peak_bytes == in_bytes[rank], where
        assert one.peak_held == held[rank], f"{where}, held {one.peak_held}, and {held[rank]} predicted"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_rank_holds_as_many_microbatches_and_bytes_as_predicted(n: int):
    names = [
        (name, chunks, m)
        for name, chunks in ALL_SCHEDULES
        for m in ((2, 9) if name in ("1f1b", "zb_h1", "zb_v") else (n + 2,))
    ]
    cases = [
        Case(f"{name}, m={m}", table_of(name, n, m, chunks), n * stages_per_rank(name, chunks))
        for name, chunks, m in names
    ]
    for case, (name, chunks, m), seen in zip(cases, names, seen_in(cases, n), strict=True):
        held = [theory.held(name, n, m, chunks, rank) for rank in range(n)]
        assert_as_predicted(case, seen, held)


@pytest.mark.parametrize("n", [1, 3])
def test_the_stages_of_a_gpt_hold_what_is_predicted_for_any_table(n: int):
    cases = [
        Case(f"{name}", table_of(name, n, 4, chunks), n * stages_per_rank(name, chunks) + 1)
        for name, chunks in ALL_SCHEDULES[1:6]
    ]
    cases += [Case(f"any_table {seed}", any_table(n, n, 4, seed), n + 1) for seed in range(3)]
    seen = seen_in(cases, n, lambda layers: gpt(num_layers=layers), text, rows=1)
    for case, of_case in zip(cases, seen, strict=True):
        held = simulate(case.table, Costs.equal(num_stages(case.table), 1, 1, 1)).peak_held
        assert_as_predicted(case, of_case, held)


def test_1f1b_holds_the_pipelines_depth_however_many_microbatches_and_gpipe_all_of_them():
    names, ms = ("1f1b", "zb_h1", "gpipe"), (3, 6, 12)
    cases = [Case(name, table_of(name, 3, m), 3) for name in names for m in ms]
    held = {}
    for i, seen in enumerate(seen_in(cases, 3)):
        held[names[i // 3], ms[i % 3]] = [one.peak_held for one in seen]
    for m in ms:
        assert held["1f1b", m] == [3, 2, 1]
        assert held["zb_h1", m] == [3, 3, 3]
        assert held["gpipe", m] == [m, m, m]


def test_recomputing_keeps_the_input_only():
    cases = [
        Case(name, table_of(name, 3, 4, chunks), 6, recompute)
        for name, chunks in (("gpipe", 1), ("interleaved", 2))
        for recompute in (False, True)
    ]
    for make, batch_of, inputs in (
        (mlp, vectors, None),
        (lambda layers: gpt(num_layers=layers), text, 3 * 5 * 8 * 8),
    ):
        seen = seen_in(cases, 3, make, batch_of)
        for case, kept, recomputed in zip(cases[::2], seen[::2], seen[1::2], strict=True):
            for rank, (most, least) in enumerate(zip(kept, recomputed, strict=True)):
                assert least.peak_bytes < most.peak_bytes, (case.what, rank)
                if inputs is not None:
                    sizes = {stage: inputs * (stage > 0) for stage in most.kept_by_forward}
                    assert least.kept_by_forward == sizes, (case.what, rank)
            assert [one.peak_bytes for one in recomputed] == predicted(case.table, recomputed)


def test_watching_changes_no_gradient():
    def compare(cluster: Cluster) -> None:
        for make, batch_of in ((partial(mlp, 5), vectors), (partial(gpt, num_layers=4), text)):
            x, y = batch_of(6)
            for name in ("1f1b", "zb_v"):
                for recompute in (False, True):
                    gradients = []
                    for watch in (None, ActivationWatch()):
                        pipeline = Pipeline(make(), table_of(name, 2, 3), loss_of, x[:2], recompute=recompute)
                        pipeline.executor.watch = watch
                        pipeline.step(x, y)
                        gradients.append([p.grad for p in pipeline.parameters()])
                    assert all(map(torch.equal, *gradients)), (name, recompute)

    run_ranks(compare, 2)


def test_the_watch_counts_a_storage_once_and_notices_what_is_kept():
    watch, x = ActivationWatch(), torch.ones(10, requires_grad=True)
    with watch.saving(0, 0):
        doubled = x * 2
        y = (doubled.square() + doubled.view(2, 5).square().flatten()).sum()
    watch.update_peak()
    assert watch.kept_by_forward == {0: 40} and (watch.peak_bytes, watch.peak_held) == (40, 1)
    with watch.saving(0, 1):
        z = (x * 2).square().sum()
    watch.update_peak()
    assert (watch.peak_bytes, watch.peak_held) == (80, 2)
    y.backward()
    z.backward()
    later = torch.ones(5)
    watch.deferred(0, 1, [doubled, later])  # the first one belongs to microbatch 0
    assert watch._alive((0, 0)) == 40 and watch._alive((0, 1)) == 20 and watch.kept_for_weight == {0: 20}
    del doubled, later
    assert watch._alive((0, 0)) == watch._alive((0, 1)) == 0
