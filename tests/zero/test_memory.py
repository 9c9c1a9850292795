"""Test the formulas of memory, and the report that compares a rank's memory with them."""

from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP
from lab.ranks import run_ranks
from zero.memory import (
    Held,
    MemoryReport,
    Share,
    formula,
    of_one_process,
    owned,
    padding_of,
    shares_of,
)
from zero.shards import FlatLayout


def test_the_formula_gives_the_gigabytes_of_the_papers_figure_1():
    # 7.5 billion parameters on 64 ranks, 2 bytes each, and 12 for Adam in mixed precision.
    one_process = Held(15.0, 15.0, 90.0)
    totals = [sum(astuple(formula(stage, one_process, 64))) for stage in (0, 1, 2, 3)]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(WorkbookError, match="there is no stage 4"):
        formula(4, Held(1, 1, 1), 2)


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_shards_add_up_to_the_formula_and_padding_makes_them_equal(
    sizes: list[list[int]], ranks: int, states: int
):
    groups = [[nn.Parameter(torch.empty(size, device="meta")) for size in group] for group in sizes]
    for parameter in groups[0]:
        parameter.requires_grad_(False)
    model = nn.ParameterList(parameter for group in groups for parameter in group)
    shares = [shares_of(model, [FlatLayout(group, rank, ranks) for group in groups]) for rank in range(ranks)]
    one_process = of_one_process(shares[0], states)
    assert one_process.parameters == 4 * sum(sum(group) for group in sizes)
    assert one_process.gradients == 4 * sum(sum(group) for group in sizes[1:])
    for stage in (1, 2, 3):
        total = [sum(astuple(owned(stage, s, states))[i] for s in shares) for i in range(3)]
        assert total == pytest.approx([ranks * part for part in astuple(formula(stage, one_process, ranks))])
    held = [owned(3, s, states).parameters + padding_of(3, s).parameters for s in shares]
    assert set(held) == {4 * sum(-(-sum(group) // ranks) for group in sizes)}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().sum().backward()
    optimizer.step()


def plain(cluster: Cluster, stage: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, MemoryReport]:
    model = MLP([10, 20, 30])
    optimizer = torch.optim.AdamW(model.parameters())
    shares = [Share(p.numel(), p.numel()) for p in model.parameters()]
    return model, optimizer, MemoryReport(cluster, stage, model, optimizer, shares, 2)


def test_the_table_has_a_row_for_each_rank_and_the_formulas_below(capfd):
    def work(cluster: Cluster) -> dict[str, int]:
        model, optimizer, report = plain(cluster)
        with report.forward():
            model(torch.zeros(cluster.rank + 1, 10))
        step(model, optimizer, torch.zeros(3, 10))
        return report.finish()

    results = run_ranks(work, 3)
    numbers = 10 * 20 + 20 + 20 * 30 + 30
    for rank, fields in enumerate(results):
        assert fields["parameters_bytes"] == fields["formula_parameters_bytes"] == 4 * numbers
        assert fields["gradients_bytes"] == fields["formula_gradients_bytes"] == 4 * numbers
        assert fields["optimizer_state_bytes"] == fields["formula_optimizer_state_bytes"] == 8 * numbers
        assert fields["step_counters_bytes"] == 4 * 4
        assert fields["padding_bytes"] == 0
        assert fields["activations_bytes"] == 4 * (10 + 20) * (rank + 1)
    lines = [line.removeprefix("[rank 0] ").split() for line in capfd.readouterr().out.splitlines()]
    held = ["3.4", "kB", "3.4", "kB", "6.8", "kB"]
    assert [line[:7] for line in lines if line and line[0] in "012"] == [[str(r), *held] for r in range(3)]
    assert ["P+G+O", *held] in lines
    assert any("equal to the formula to the byte" in " ".join(line) for line in lines)


def test_only_the_first_forwards_activations_count():
    def work(cluster: Cluster) -> None:
        model, _, report = plain(cluster)
        for examples in (3, 5):
            with report.forward():
                model(torch.zeros(examples, 10))
        assert report.measure().activations == 4 * (10 + 20) * 3

    run_ranks(work, 1)


def test_a_gradient_that_should_be_freed_is_reported(capfd):
    def work(cluster: Cluster) -> None:
        model, optimizer, _ = plain(cluster)
        shares = [Share(p.numel(), p.numel() // 2) for p in model.parameters()]
        step(model, optimizer, torch.zeros(3, 10))
        optimizer.state.clear()
        MemoryReport(cluster, 2, model, optimizer, shares, 0).finish()

    run_ranks(work, 2)
    assert "3,400 bytes" in capfd.readouterr().out  # half of 850 numbers' gradients, on two ranks
