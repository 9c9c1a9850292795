from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from data_parallel.flat import Flat
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP
from lab.ranks import run_ranks
from zero.memory import (
    Held,
    MemoryReport,
    Share,
    flat_share,
    formula,
    of_one_process,
    owned,
    padding_of,
    replicated,
    states_of,
)


def test_the_formula_gives_the_gigabytes_of_the_papers_figure_1():
    # 7.5 billion parameters on 64 ranks, 2 bytes each, and 12 for Adam in mixed precision.
    one_process = Held(15.0, 15.0, 90.0)
    totals = [sum(astuple(formula(stage, one_process, 64))) for stage in (0, 1, 2, 3)]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(WorkbookError, match="there is no stage 4"):
        formula(4, Held(1, 1, 1), 2)


@pytest.mark.parametrize(
    ("optimizer", "defaults", "states"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.AdamW, {}, 2),
        (torch.optim.AdamW, {"amsgrad": True}, 3),
    ],
)
def test_an_optimizers_numbers_per_parameter_are_found_without_its_step_counters(optimizer, defaults, states):
    assert states_of(optimizer, **defaults) == states


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_shards_add_up_to_the_formula_and_padding_makes_them_equal(
    sizes: list[list[int]], ranks: int, states: int
):
    parameters = [[nn.Parameter(torch.empty(size, device="meta")) for size in group] for group in sizes]
    shares = [
        [flat_share(Flat(group, rank, ranks), trained=i > 0) for i, group in enumerate(parameters)]
        for rank in range(ranks)
    ]
    one_process = of_one_process(shares[0], states)
    assert one_process.parameters == 4 * sum(sum(group) for group in sizes)
    assert one_process.gradients == 4 * sum(sum(group) for group in sizes[1:])
    for stage in (1, 2, 3):
        total = [sum(astuple(owned(stage, s, states))[i] for s in shares) for i in range(3)]
        assert total == pytest.approx([ranks * part for part in astuple(formula(stage, one_process, ranks))])
    held = [owned(3, s, states).parameters + padding_of(3, s).parameters for s in shares]
    assert set(held) == {4 * sum(-(-sum(group) // ranks) for group in sizes)}


def pieces_of(cluster: Cluster, model: nn.Module, stage: int) -> tuple[list[nn.Parameter], list[Share]]:
    """Put the trained parameters into a flat tensor, as a stage does; return this rank's pieces."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = Flat(trained, cluster.rank, cluster.world_size)
    full, gradient = torch.zeros(2, flat.numel).unbind()
    full, gradient = full.clone(), gradient.clone()
    shard = full[flat.mine] if stage < 3 else full[flat.mine].clone()
    gradient_shard = gradient[flat.mine] if stage < 2 else gradient[flat.mine].clone()
    for parameter, view, its_gradient in zip(trained, flat.views(full), flat.views(gradient), strict=True):
        parameter.data = view
        parameter.grad = its_gradient if stage < 2 else None
    if stage == 3:
        full.untyped_storage().resize_(0)
    pieces = [nn.Parameter(part) for _, part in flat.pieces(shard)]
    for piece, (_, part) in zip(pieces, flat.pieces(gradient_shard), strict=True):
        piece.grad = part
    frozen = [replicated(p) for p in model.parameters() if not p.requires_grad]
    return pieces, [flat_share(flat), *frozen]


def test_measured_bytes_of_each_stage_equal_the_formula_and_its_padding():
    def work(cluster: Cluster) -> None:
        for stage, optimizer_class, defaults, states in (
            (1, torch.optim.AdamW, {}, 2),
            (2, torch.optim.SGD, {"momentum": 0.9}, 1),
            (3, torch.optim.SGD, {}, 0),
        ):
            model = MLP([7, 5, 3])
            model.layers[0].bias.requires_grad_(False)
            pieces, shares = pieces_of(cluster, model, stage)
            optimizer = optimizer_class(pieces, **defaults)
            optimizer.step()
            measured = MemoryReport(cluster, stage, model, optimizer, shares, states).measure()
            should, padding = owned(stage, shares, states), padding_of(stage, shares)
            for name in ("parameters", "gradients", "optimizer_state"):
                expected = getattr(should, name) + getattr(padding, name)
                assert getattr(measured, name) == expected, (stage, name)
            assert measured.amiss(should, padding) == 0
            assert measured.step_counters == (4 * len(pieces) if states == 2 else 0)
            assert measured.peak > 1 << 20

    run_ranks(work, 3)  # 53 trained numbers: one of padding


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


def test_a_buffer_beside_the_gradients_counts_among_the_other_tensors():
    def work(cluster: Cluster) -> None:
        model, optimizer, report = plain(cluster)
        data = torch.zeros(1000)
        step(model, optimizer, torch.zeros(3, 10))
        before = report.measure(aside=[data]).other_tensors
        model.bucket = [torch.zeros(12345)]
        assert report.measure(aside=[data]).other_tensors == before + 4 * 12345
        assert report.measure().other_tensors == before + 4 * 12345 + 4000

    run_ranks(work, 1)
