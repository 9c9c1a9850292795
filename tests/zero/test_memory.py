"""Test the formulas of memory, and the report that compares a rank's memory with them."""

from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero.memory import Held, formula, of_one_process, owned, shares_of
from zero.shards import FlatLayout, ParameterShard


def test_the_formula_gives_the_gigabytes_of_the_papers_figure_1():
    # 7.5 billion parameters on 64 ranks, 2 bytes each, and 12 for Adam in mixed precision.
    one_process = Held(15.0, 15.0, 90.0)
    totals = [sum(astuple(formula(stage, one_process, 64))) for stage in (0, 1, 2, 3)]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]


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
    layouts = [[FlatLayout(group, rank, ranks) for group in groups] for rank in range(ranks)]
    shares = [shares_of(model, shards_of(own)) for own in layouts]
    one_process = of_one_process(shares[0], states)
    assert one_process.parameters == 4 * sum(sum(group) for group in sizes)
    assert one_process.gradients == 4 * sum(sum(group) for group in sizes[1:])
    for stage in (1, 2, 3):
        total = [sum(astuple(owned(stage, s, states))[i] for s in shares) for i in range(3)]
        assert total == pytest.approx([ranks * part for part in astuple(formula(stage, one_process, ranks))])
    padding = 4 * sum(layout.padding for layout in layouts[0])
    in_shards = sum(4 * (own.mine.stop - own.mine.start) for of_rank in layouts for own in of_rank)
    assert sum(owned(3, s, states).parameters for s in shares) + padding == in_shards


def shards_of(layouts: list[FlatLayout]) -> list[ParameterShard]:
    """Return a rank's shard of each parameter."""
    sizes = [layout.mine.stop - layout.mine.start for layout in layouts]
    empty = [torch.empty(size, device="meta") for size in sizes]
    return [
        shard for layout, flat in zip(layouts, empty, strict=True) for shard in layout.parameter_shards(flat)
    ]
