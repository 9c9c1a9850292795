"""The planner tries every division, ranks those that fit, and says why each loser lost."""

import json
import subprocess
import sys
import time
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hybrid_parallel.planner.auto
from comm.cost import Link
from hybrid_parallel.planner.__main__ import Args, main
from hybrid_parallel.planner.auto import measured_machine
from hybrid_parallel.planner.machine import MACHINES, Machine
from hybrid_parallel.planner.memory import predict_memory
from hybrid_parallel.planner.search import Plan, best_by_division, candidates, choose, plans, reason_of
from hybrid_parallel.planner.shapes import SHAPES, MLPShape, ModelShape, shape_of
from hybrid_parallel.planner.step_time import Seconds, TimeModel
from hybrid_parallel.planner.table import table_of
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.launch.errors import WorkbookError

H100, H200 = MACHINES["h100"], MACHINES["h200"]
LLAMA, MIXTRAL = SHAPES["llama-3-8b"], SHAPES["mixtral-8x7b"]
SMALL_EXPERTS = ModelShape(4, 32, 4, 64, 48, num_kv_heads=4, experts=6, active_experts=2)


@cache
def on_8_devices() -> list[Plan]:
    return plans(LLAMA, H100, 8, 64)


def with_memory(machine: Machine, num_bytes: float) -> Machine:
    return replace(machine, device=replace(machine.device, memory_bytes=num_bytes))


def values(found: list[Plan], field: str) -> set[object]:
    return {getattr(plan.sizes, field) for plan in found}


def test_16384_devices_are_planned_on_paper_within_five_seconds():
    start = time.process_time()
    found = plans(SHAPES["llama-3-405b"], H100, 16_384, 2048)
    assert time.process_time() - start < 5 and len(found) > 1000


def test_the_choice_for_llama_3_405b_without_a_context_axis_is_the_division_of_its_paper():
    best = plans(SHAPES["llama-3-405b"], H100, 16_384, 2048, given={"context": 1})[0].sizes
    assert (best.pipeline, best.data, best.tensor, best.schedule) == (16, 128, 8, "interleaved")


def test_plans_come_in_order_and_those_that_do_not_fit_at_the_end():
    found = on_8_devices()
    fit = [plan for plan in found if plan.seconds is not None]
    assert found[: len(fit)] == fit and len(fit) < len(found)
    steps = [plan.step_seconds for plan in fit]
    assert all(a <= b * 1.001 for a, b in pairwise(steps))
    rest, usable = [plan.memory_bytes for plan in found[len(fit) :]], 0.95 * H100.device.memory_bytes
    assert rest == sorted(rest)
    assert max(plan.memory_bytes for plan in fit) <= usable < min(rest)
    assert {plan.sizes.precision for plan in found} == {"bf16"}


def test_every_plan_makes_sense_and_is_there_once():
    shape = shape_of("24heads")
    found = plans(shape, H100, 12, 24)
    for plan in found:
        refuse_sizes(plan.sizes, shape, 24, 12)
    assert len({plan.sizes for plan in found}) == len(found)
    for field, values in {
        "pipeline": {1, 2, 3, 4},
        "context": {1, 2, 3, 4, 6},
        "attention": {"ring", "all_to_all"},
        "expert_ranks": {1},
        "tensor": {1, 2, 3, 4, 6},
        "zero": {0, 1, 2, 3},
        "schedule": {"1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"},
        "recompute": {False, True},
        "sequence_parallel": {False, True},
    }.items():
        assert {getattr(plan.sizes, field) for plan in found} == values


def test_an_mlp_is_planned_without_what_it_has_not():
    shape = MLPShape(num_layers=8, width=1024)
    found = plans(shape, H100, 4, 64)
    for plan in found:
        refuse_sizes(plan.sizes, shape, 64, 4)
    assert {plan.sizes.tensor for plan in found} == {1, 2, 4} and {p.sizes.pipeline for p in found} == {
        1,
        2,
        4,
    }
    assert not any(plan.sizes.sequence_parallel for plan in found)


def test_given_sizes_stay_as_they_are():
    wanted = {"pipeline": 2, "zero": 1, "microbatches": 4, "schedule": "zb_h1", "recompute": True}
    found = plans(LLAMA, H100, 8, 64, given=wanted | {"pattern": "tree"})
    assert found
    for plan in found:
        assert wanted.items() <= vars(plan.sizes).items() and plan.sizes.pattern == "tree"
    every = ParallelSizes(pipeline=2, data=2, tensor=2, microbatches=4, precision="bf16")
    all_given = {field.name: getattr(every, field.name) for field in fields(every)}
    assert [plan.sizes for plan in plans(LLAMA, H100, 8, 64, given=all_given)] == [every]


def test_the_best_plan_depends_on_the_link():
    shape, batch = SHAPES["llama-3-8b"], 64
    slow = replace(H100, devices_per_node=1, outer=replace(H100.outer, beta=1e-8))
    assert plans(shape, H100, 8, batch)[0].sizes.pipeline == 1
    assert plans(shape, slow, 8, batch)[0].sizes.pipeline > 1


def test_less_memory_makes_plans_that_hold_less():
    free = plans(LLAMA, with_memory(H100, 1e15), 8, 64)[0]
    tight = plans(LLAMA, with_memory(H100, free.memory_bytes * 0.5), 8, 64)[0]
    assert tight.memory_bytes < 0.5 * free.memory_bytes and tight.step_seconds > free.step_seconds


def test_a_run_of_this_workbook_on_gpus_is_planned_with_autocast(monkeypatch):
    monkeypatch.setattr(hybrid_parallel.planner.auto, "measure_all_reduce", lambda *_, **__: Link(1.0, 1.0))
    monkeypatch.setattr(hybrid_parallel.planner.auto, "default_pattern", lambda _: "ring")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    machine = measured_machine(SimpleNamespace(device=torch.device("cuda"), world_size=8))
    assert machine.device == H100.device and machine.autocast and not H100.autocast


def test_a_reason_names_what_differs():
    found = on_8_devices()
    assert found[0].reason == "the fastest that fits"
    again = replace(found[0].sizes, recompute=not found[0].sizes.recompute)
    slower = next(plan for plan in found if plan.sizes == again)
    assert "slower" in slower.reason and "more for computing" in slower.reason
    roomy = plans(LLAMA, with_memory(H100, 1e12), 8, 64)
    assert any("more idle in the pipeline" in plan.reason for plan in roomy)
    too_large = next(p for p in found if p.seconds is None and p.memory.optimizer_state > p.memory_bytes / 2)
    assert too_large.reason.startswith("needs ") and "for optimizer state" in too_large.reason


def test_of_equally_fast_plans_the_one_with_larger_microbatches_and_less_memory_is_first():
    alone = plans(shape_of("small"), H100, 1, 8, given={"recompute": False})
    assert [plan.sizes.microbatches for plan in alone] == [1, 2, 4, 8]
    assert {plan.reason for plan in alone[1:]} == {"as fast, with smaller microbatches"}
    given = {"pipeline": 2, "microbatches": 8, "recompute": False}
    found = {p.sizes.schedule: p for p in plans(shape_of("small"), H100, 2, 8, given=given)}
    more = found["gpipe"].memory_bytes - found["1f1b"].memory_bytes
    assert list(found).index("1f1b") < list(found).index("gpipe") and more > 0


def test_plans_that_differ_in_the_fourth_digit_are_told_apart_in_their_reason():
    sizes = ParallelSizes(data=4)
    held = predict_memory(LLAMA, sizes, 64)

    def plan(compute: float, bytes_more: float) -> Plan:
        seconds = Seconds(compute, *[0.0] * (len(fields(Seconds)) - 1))
        return Plan(sizes, replace(held, temporary=held.temporary + bytes_more), seconds)

    best = plan(9.0, 1e9)
    assert reason_of(plan(9.0004, 2e9), best, 1e12) == "as fast, with 1.0 GB more memory"
    assert reason_of(plan(9.0004, 1e9), best, 1e12) == "as fast, with no more memory"
    assert reason_of(plan(9.004, 0), best, 1e12).startswith("0.04% slower: ")
    assert reason_of(plan(9.09, 0), best, 1e12).startswith("1.0% slower: ")


def test_a_table_has_one_row_for_each_division():
    found = on_8_devices()
    axes = ("pipeline", "data", "context", "tensor")
    rows = [tuple(getattr(plan.sizes, axis) for axis in axes) for plan in best_by_division(found)]
    powers = (1, 2, 4, 8)
    assert sorted(rows) == sorted(
        (p, 8 // p // c // t, c, t) for p in powers for c in (1, 2, 4) for t in powers if p * c * t <= 8
    )


@pytest.mark.parametrize(
    ("devices", "batch", "given", "sentence"),
    [
        (0, 8, {}, "The number of devices is 0; it must be at least 1."),
        (8, 0, {}, "The number of examples in a step is 0"),
        (37, 8, {}, "No division of 37 devices makes sense for this model of 32 layers"),
        (8, 8, {"pipeline": 3}, "and pipeline 3; take another number of devices or examples."),
        (8, 8, {"data": 3}, "No division of 8 devices"),
    ],
)
def test_impossible_inputs_are_refused_in_a_sentence(devices: int, batch: int, given, sentence: str):
    with pytest.raises(WorkbookError) as refused:
        plans(replace(LLAMA, num_layers=32), H100, devices, batch, given=given)
    assert sentence in str(refused.value)


def test_no_plan_fits_is_said_with_the_smallest_need():
    found = plans(SHAPES["llama-3-405b"], H100, 8, 8)
    with pytest.raises(WorkbookError, match=r"No plan fits: the smallest one needs \d.* (TB|GB) per device"):
        choose(found, H100.device.memory_bytes)
    need = found[0].memory_bytes
    found = plans(SHAPES["llama-3-405b"], with_memory(H100, need / 0.99), 8, 8)
    with pytest.raises(WorkbookError, match="No plan fits"):  # of the memory only 0.95 can be used
        choose(found, need / 0.99)


def test_the_table_shows_the_choice_and_its_step(capsys):
    main(Args(model="llama-3-8b", devices=8, batch=64))
    said = capsys.readouterr().out
    best = on_8_devices()[0]
    assert "Choice: 8 ranks" in said and str(best.sizes) in said and "the fastest that fits" in said
    used = TimeModel(LLAMA, H100, 64).utilisation(best.sizes, best.step_seconds, causal=True)
    assert f"{used:.1%}" in said


def test_json_holds_the_sizes_and_the_predictions(capsys):
    main(Args(model="small", devices=4, batch=16, json=True, rows=2))
    said = json.loads(capsys.readouterr().out)
    best = plans(shape_of("small"), H100, 4, 16)[0]
    assert len(said["plans"]) == 2 and said["plans"][0]["step_seconds"] == best.step_seconds
    assert said["plans"][0] | vars(best.sizes) == said["plans"][0]


def test_the_command_line_ends_with_a_sentence_and_no_stack_trace():
    command = [sys.executable, "-m", "hybrid_parallel.planner", "--model", "llama-4"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.startswith("There is no model 'llama-4'") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"devices": 0}, "The number of devices is 0"),
        ({"rows": 0}, "The number of rows is 0"),
        ({"sequence_length": 0}, "sequence_length of a model is 0; it must be at least 1."),
        ({"batch": -1}, "The number of examples in a step is -1"),
        ({"link": "fast"}, "--link fast"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(wrong, sentence: str):
    with pytest.raises(WorkbookError, match=sentence):
        main(Args(**wrong))


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


def test_a_long_sequence_is_cut_into_pieces_of_2048_tokens_or_more_unless_a_size_is_given():
    def contexts(length: int, **given: int) -> set[object]:
        shape = replace(SHAPES["llama-3-8b"], sequence_length=length)
        found = candidates(shape, H100, 64, 64, {"pipeline": 1, "tensor": 1, "zero": 0, **given})
        return {sizes.context for sizes in found}

    assert contexts(8192) == {1, 2, 4} and contexts(65_536) == {1, 2, 4, 8, 16, 32}
    assert contexts(8192, context=16) == {16}
    assert contexts(48) == {1, 2, 4, 8}


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


def test_the_choice_depends_on_what_a_ring_can_hide():
    shape = replace(SHAPES["llama-3-8b"], sequence_length=65_536)
    given = {"context": 8, "recompute": True, "zero": 3}
    apart = replace(H100, devices_per_node=1)
    # With 8 key heads for 32 query heads messages are short enough to hide behind the attention to a block.
    for kv_heads, attention in ((8, "ring"), (32, "all_to_all")):
        found = plans(replace(shape, num_kv_heads=kv_heads), apart, 8, 8, given=given)
        assert found[0].sizes.attention == attention


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
