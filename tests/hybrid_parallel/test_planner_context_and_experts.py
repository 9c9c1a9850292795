"""The planner offers a context axis and divided experts where they make sense, and shows both."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.cost import Link
from hybrid_parallel.planner.machine import MACHINES, Machine
from hybrid_parallel.planner.memory_model import predict_memory
from hybrid_parallel.planner.mlp_shape import MLPShape
from hybrid_parallel.planner.plan import Plan, best_by_division, reason_of, table_of
from hybrid_parallel.planner.search import Args, candidates, choose, main, plans
from hybrid_parallel.planner.shapes import SHAPES, ModelShape, shape_of_config, workbook_shape
from hybrid_parallel.planner.time_model import TimeModel
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.launch.errors import WorkbookError
from lab.models.model import GPTConfig, MLPConfig

H100, H200 = MACHINES["h100"], MACHINES["h200"]
MIXTRAL = SHAPES["mixtral-8x7b"]
SMALL_EXPERTS = ModelShape(4, 32, 4, 64, 48, num_kv_heads=4, experts=6, active_experts=2)


def values(found: list[Plan], field: str) -> set[object]:
    return {getattr(plan.sizes, field) for plan in found}


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([SMALL_EXPERTS, replace(SMALL_EXPERTS, experts=1, active_experts=1, dropout=True)]),
    st.sampled_from([1, 2, 4, 6, 8, 12]),
    st.sampled_from([1, 3, 8, 12]),
    st.sampled_from([{}, {"context": 2}, {"context": 3, "attention": "ring"}, {"expert_ranks": 2}]),
)
def test_every_candidate_is_a_division_that_training_accepts(shape, devices: int, batch: int, given):
    found = list(candidates(shape, H100, devices, batch, given))
    for sizes in found:
        refuse_sizes(sizes, shape, batch, devices, shape.experts)
        assert given.items() <= vars(sizes).items()
    assert len(set(found)) == len(found)


def test_experts_are_divided_among_as_many_replicas_as_can_share_them_equally():
    found = plans(SMALL_EXPERTS, H100, 6, 12)
    assert values(found, "expert_ranks") == {1, 2, 3, 6}
    assert values([plan for plan in found if plan.sizes.replicas == 2], "expert_ranks") == {1, 2}
    divided = [plan for plan in found if plan.sizes.expert_ranks > 1]
    assert values(divided, "zero") == {0} and values(found, "sequence_parallel") == {False}
    assert any(plan.sizes.data == 1 for plan in divided)  # the replicas of a context axis share them, too


def test_a_model_without_experts_or_sequences_has_none_to_divide():
    dense = plans(workbook_shape("small"), H100, 4, 8)
    assert values(dense, "expert_ranks") == {1} and values(dense, "context") == {1, 2, 4}
    mlp = plans(MLPShape(num_layers=4, width=64), H100, 4, 8)
    assert values(mlp, "context") == values(mlp, "expert_ranks") == {1}


def test_zero_divides_among_the_ranks_of_a_context_axis_as_among_replicas():
    found = plans(workbook_shape("small"), H100, 4, 8, given={"data": 1, "context": 4})
    assert values(found, "zero") == {0, 1, 2, 3}
    alone = plans(workbook_shape("small"), H100, 4, 8, given={"data": 1, "context": 1, "pipeline": 1})
    assert values(alone, "zero") == {0}


def test_a_long_sequence_is_cut_into_pieces_of_2048_tokens_or_more_unless_a_size_is_given():
    def contexts(length: int, **given: int) -> set[object]:
        shape = replace(SHAPES["llama-3-8b"], sequence_length=length)
        found = candidates(shape, H100, 64, 64, {"pipeline": 1, "tensor": 1, "zero": 0, **given})
        return {sizes.context for sizes in found}

    assert contexts(8192) == {1, 2, 4} and contexts(65_536) == {1, 2, 4, 8, 16, 32}
    assert contexts(8192, context=16) == {16}
    assert contexts(48) == {1, 2, 4, 8}


def test_more_ranks_than_examples_are_used_along_the_context_axis():
    found = plans(SHAPES["llama-3-8b"], H100, 16, 4, given={"pipeline": 1, "tensor": 1})
    assert values(found, "context") == {4} and values(found, "data") == {4}
    with pytest.raises(WorkbookError, match="tensor 1, context 1; take another number"):
        plans(SHAPES["llama-3-8b"], H100, 16, 4, given={"pipeline": 1, "tensor": 1, "context": 1})


@pytest.mark.parametrize(
    "given", [{"context": 16}, {"context": 3}, {"data": 8, "context": 2}, {"tensor": 16}]
)
def test_sizes_that_do_not_go_into_the_devices_are_refused_in_a_sentence(given: dict[str, int]):
    with pytest.raises(WorkbookError, match="No division of 8 devices makes sense"):
        plans(SHAPES["llama-3-8b"], H100, 8, 8, given=given)


def test_a_sequence_that_fits_on_no_rank_fits_if_it_is_cut():
    shape = replace(SHAPES["llama-3-8b"], sequence_length=1 << 20)
    whole, cut = (plans(shape, H100, 64, 16, given=given) for given in ({"context": 1}, {}))
    with pytest.raises(WorkbookError, match="No plan fits"):
        choose(whole, H100.device.memory_bytes)
    assert choose(cut, H100.device.memory_bytes).sizes.context > 1


def test_replicas_hold_mixtral_without_zero_only_if_they_share_its_experts():
    replicas = {"pipeline": 1, "tensor": 1, "zero": 0}
    found = plans(replace(MIXTRAL, sequence_length=2048), H200, 8, 64, given=replicas)
    fit = [plan for plan in found if plan.seconds is not None]
    assert values(found, "expert_ranks") == {1, 2, 4, 8} and values(fit, "expert_ranks") == {8}


def test_more_expert_ranks_hold_less_and_a_longer_context_axis_does_too():
    def held(**axes: int) -> float:
        return predict_memory(MIXTRAL, ParallelSizes(**axes, precision="bf16"), 8).total

    by_experts = [held(data=8, expert_ranks=e) for e in (1, 2, 4, 8)]
    by_context = [held(context=c) for c in (1, 2, 4, 8)]
    for each in (by_experts, by_context):
        assert each == sorted(each, reverse=True) and len(set(each)) == 4


def test_the_choice_depends_on_what_a_ring_can_hide():
    shape = replace(SHAPES["llama-3-8b"], sequence_length=65_536)
    given = {"context": 8, "recompute": True, "zero": 3}
    apart = replace(H100, devices_per_node=1)
    # With 8 key heads for 32 query heads messages are short enough to hide behind the attention to a block.
    for kv_heads, attention in ((8, "ring"), (32, "all_to_all")):
        found = plans(replace(shape, num_kv_heads=kv_heads), apart, 8, 8, given=given)
        assert found[0].sizes.attention == attention


def reasons(found: list[Plan]) -> Iterator[str]:
    return (plan.reason for plan in found)


def test_a_reason_names_the_messages_of_a_context_axis_and_of_experts():
    slow = Machine(H100.device, 1, Link(1e-5, 1e-8), Link(1e-5, 1e-8))
    given = {"pipeline": 1, "tensor": 1, "zero": 0, "recompute": False}
    shape = replace(SHAPES["llama-3-8b"], num_layers=2)
    found = plans(shape, slow, 4, 8, given=given)
    assert found[0].sizes.context == 1
    assert any("more for messages of the context axis" in reason for reason in reasons(found))
    # With many examples in a step, tokens are more than the gradients of all experts.
    found = plans(replace(MIXTRAL, num_layers=2), replace(H100, devices_per_node=1), 8, 2048, given=given)
    assert found[0].sizes.expert_ranks == 1
    assert any("more for sending tokens to experts" in reason for reason in reasons(found))


def heads(found: list[Plan], shape: ModelShape) -> list[object]:
    return [column.header for column in table_of(found, TimeModel(shape, H100, 8)).columns]


def test_a_table_has_columns_for_context_and_experts_only_if_a_plan_uses_them():
    shape = SMALL_EXPERTS
    before = ["pipeline", "data", "tensor", "microbatches", "schedule", "ZeRO"]
    before += ["also", "memory", "step", "MFU", "why"]
    found = {
        key: plans(shape, H100, 2, 8, given={"context": key[0], "expert_ranks": key[1]})
        for key in ((1, 1), (2, 1), (1, 2), (2, 2))
    }
    assert heads(found[1, 1], shape) == before
    assert heads(found[2, 1], shape) == [*before[:2], "context", *before[2:]]
    assert heads(found[1, 2], shape) == [*before[:3], "experts", *before[3:]]
    both = [*before[:2], "context", "tensor", "experts", *before[3:]]
    assert heads(found[2, 2], shape) == heads(found[1, 1] + found[2, 2], shape) == both


def test_a_table_has_one_row_for_each_division_of_sequences_and_experts():
    found = plans(SMALL_EXPERTS, H100, 2, 8)
    rows = [
        (p.sizes.pipeline, p.sizes.data, p.sizes.context, p.sizes.tensor, p.sizes.expert_ranks)
        for p in best_by_division(found)
    ]
    axes = [(2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1)]
    assert sorted(rows) == sorted([(*row, 1) for row in axes] + [(*row, 2) for row in axes[2:]])


def test_the_command_line_divides_the_experts_of_mixtral(capsys):
    main(Args(model="mixtral-8x7b", devices=16, batch=64, rows=3))
    said = " ".join(capsys.readouterr().out.split())
    assert "experts on 8 ranks" in said and "tensor experts microbatches" in said
    main(Args(model="mixtral-8x7b", devices=16, batch=64, rows=1, json=True))
    [best] = json.loads(capsys.readouterr().out)["plans"]
    assert best["expert_ranks"] == 8 and best["step_seconds"] > 0


def test_the_command_line_cuts_long_sequences_and_keeps_a_given_context_axis(capsys):
    main(Args(model="llama-3-8b", devices=64, sequence_length=131_072, batch=64, rows=1))
    assert "(context)" in capsys.readouterr().out
    main(Args(model="small", devices=4, batch=16, context=2, json=True, rows=100))
    found = json.loads(capsys.readouterr().out)["plans"]
    assert found and {plan["context"] for plan in found} == {2}
    with pytest.raises(WorkbookError, match=r"makes sense .* and context 3;"):
        main(Args(model="small", devices=4, batch=16, context=3))


def test_a_shape_of_the_workbook_has_the_experts_that_it_is_given():
    config = GPTConfig.named("tiny")
    shape = shape_of_config(config, 4, 2)
    assert (shape.experts, shape.active_experts) == (4, 2)
    assert shape_of_config(config) == workbook_shape("tiny")
    with pytest.raises(WorkbookError, match="experts is 4, and an MLP has no blocks"):
        shape_of_config(MLPConfig(), 4, 2)
    with pytest.raises(WorkbookError, match="5 active experts are more than the model's 4 experts"):
        shape_of_config(config, 4, 5)


def test_a_plan_that_differs_in_its_messages_alone_is_slower_because_of_them():
    sizes, shape = ParallelSizes(context=2), SMALL_EXPERTS
    seconds = TimeModel(shape, H100, 8).predict(sizes)
    best = Plan(sizes, predict_memory(shape, sizes, 8), seconds)
    causes = {"context": "messages of the context axis", "experts": "sending tokens to experts"}
    for cause, words in causes.items():
        slower = replace(best, seconds=replace(seconds, **{cause: getattr(seconds, cause) + 1.0}))
        assert reason_of(slower, best, 1e12).endswith(f"slower: 1.000 s more for {words}")
