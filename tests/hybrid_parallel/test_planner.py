"""The planner tries every division, ranks those that fit, and says why each loser lost."""

import runpy
import statistics
import time
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_parallel.planner.machine import MACHINES, Machine
from hybrid_parallel.planner.memory import predict_memory
from hybrid_parallel.planner.search import Plan, candidates, plans
from hybrid_parallel.planner.shapes import SHAPES, ModelShape, shape_of
from hybrid_parallel.planner.step_time import TimeModel
from hybrid_parallel.planner.table import Args, main
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.launch.errors import WorkbookError
from tests.hybrid_parallel import published_runs as published

H100, H200 = MACHINES["h100"], MACHINES["h200"]
LLAMA, MIXTRAL = SHAPES["llama-3-8b"], SHAPES["mixtral-8x7b"]
EXPERTS = ModelShape(64, 48, 4, 4, 4, 32, experts=6, active_experts=2)
SMALL = [EXPERTS, replace(EXPERTS, experts=1, active_experts=1, dropout=0.1)]


@cache
def on_8_devices() -> list[Plan]:
    return plans(LLAMA, H100, 8, 64)


def with_memory(machine: Machine, num_bytes: float) -> Machine:
    return replace(machine, memory_bytes=num_bytes)


def values(found: list[Plan], field: str) -> set[object]:
    return {getattr(plan.sizes, field) for plan in found}


def test_the_choice_for_llama_3_405b_without_a_context_axis_is_the_division_of_its_paper():
    begin = time.process_time()
    best = plans(SHAPES["llama-3-405b"], H100, 16_384, 2048, context=1)[0].sizes
    assert (best.pipeline, best.data, best.tensor, best.schedule) == (16, 128, 8, "interleaved")
    assert time.process_time() - begin < 5


def test_plans_come_in_order_and_those_that_do_not_fit_at_the_end():
    found = on_8_devices()
    fit = [plan for plan in found if plan.seconds is not None]
    assert found[: len(fit)] == fit and len(fit) < len(found)
    steps = [plan.step_seconds for plan in fit]
    assert all(a <= b * 1.001 for a, b in pairwise(steps))
    rest, usable = [plan.memory.total for plan in found[len(fit) :]], 0.95 * H100.memory_bytes
    assert rest == sorted(rest)
    assert max(plan.memory.total for plan in fit) <= usable < min(rest)


def test_every_way_to_divide_and_to_run_is_tried():
    found = plans(shape_of("24heads"), H100, 12, 24)
    for field, expected in {
        "pipeline": {1, 2, 3, 4},
        "context": {1, 2, 3, 4, 6},
        "attention": {"ring", "all_to_all"},
        "expert_ranks": {1},
        "tensor": {1, 2, 3, 4, 6},
        "zero": {0, 1, 2, 3},
        "schedule": {"1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"},
        "recompute": {False, True},
        "sequence_parallel": {False, True},
        "precision": {"bf16"},
    }.items():
        assert values(found, field) == expected


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SMALL),
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


def test_given_sizes_stay_as_they_are():
    wanted = {"pipeline": 2, "zero": 1, "microbatches": 16, "schedule": "zb_h1", "pattern": "tree"}
    found = plans(LLAMA, H100, 8, 64, **wanted)
    assert found and all(wanted.items() <= vars(plan.sizes).items() for plan in found)
    every = ParallelSizes(pipeline=2, data=2, tensor=2, microbatches=32, precision="bf16")
    all_given = {field.name: getattr(every, field.name) for field in fields(every)}
    assert [plan.sizes for plan in plans(LLAMA, H100, 8, 64, **all_given)] == [every]


def test_the_best_plan_depends_on_the_link_and_on_the_memory():
    shape, batch = SHAPES["llama-3-8b"], 64
    slow = replace(H100, devices_per_node=1, outer=replace(H100.outer, beta=1e-8))
    assert on_8_devices()[0].sizes.pipeline == 1 < plans(shape, slow, 8, batch)[0].sizes.pipeline
    free = plans(LLAMA, with_memory(H100, 1e15), 8, batch)[0]
    tight = plans(LLAMA, with_memory(H100, free.memory.total * 0.5), 8, batch)[0]
    assert tight.memory.total < 0.5 * free.memory.total and tight.step_seconds > free.step_seconds


def test_a_reason_names_what_differs():
    found = on_8_devices()
    assert found[0].reason == "the fastest that fits"
    again = replace(found[0].sizes, recompute=not found[0].sizes.recompute)
    slower = next(plan for plan in found if plan.sizes == again)
    assert "slower" in slower.reason and "compute +" in slower.reason
    too_large = next(p for p in found if p.seconds is None and p.memory.optimizer_state > p.memory.total / 2)
    assert too_large.reason.startswith("needs ") and "for optimizer state" in too_large.reason


def test_replicas_hold_mixtral_without_zero_only_if_they_share_its_experts():
    replicas = {"pipeline": 1, "tensor": 1, "zero": 0}
    found = plans(replace(MIXTRAL, block_size=2048), H200, 8, 64, **replicas)
    fit = [plan for plan in found if plan.seconds is not None]
    assert values(found, "expert_ranks") == {1, 2, 4, 8} and values(fit, "expert_ranks") == {8}


@pytest.mark.parametrize(
    ("devices", "batch", "given", "sentence"),
    [
        (0, 8, {}, "No division of 0 devices makes sense for this model of 32 layers and 8192 tokens"),
        (8, 0, {}, "with 0 examples in a step; take another number of devices, examples or tokens."),
        (37, 8, {}, "No division of 37 devices makes sense"),
        (8, 8, {"pipeline": 3}, "with 8 examples in a step, pipeline 3; take another number"),
        (8, 8, {"context": 0}, "with 8 examples in a step, context 0; take another number"),
    ],
)
def test_impossible_inputs_are_refused_in_a_sentence(devices: int, batch: int, given, sentence: str):
    with pytest.raises(WorkbookError) as refused:
        plans(LLAMA, H100, devices, batch, **given)
    assert sentence in str(refused.value)


def test_no_plan_fits_is_said_with_the_smallest_need():
    sentence = r"No plan fits: the smallest one needs \d.* (TB|GB), and a device"
    with pytest.raises(WorkbookError, match=sentence):
        plans(SHAPES["llama-3-405b"], H100, 8, 8)


def test_the_table_shows_the_choice_its_step_and_the_axes_that_a_plan_uses(capsys):
    main(Args(model="llama-3-8b", devices=8, batch=64))
    said = capsys.readouterr().out
    best = on_8_devices()[0]
    assert "Choice: 8 ranks" in said and str(best.sizes) in said and "the fastest that fits" in said
    used = TimeModel(LLAMA, H100, 64).utilisation(best.sizes, best.step_seconds, causal=True)
    assert f"{used:.1%}" in said and "experts" not in said
    main(Args(model="mixtral-8x7b", devices=16, batch=16))
    assert "tensor experts microbatches" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "llama-4"], "There is no model 'llama-4'"),
        (["--device", "this", "--devices", "0"], "No division of 0 devices makes sense"),
    ],
)
def test_the_command_line_ends_with_a_sentence_and_no_stack_trace(words, sentence, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["planner", *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("hybrid_parallel.planner", run_name="__main__")
    said = capsys.readouterr()
    assert end.value.code == 1 and said.out == ""
    assert said.err.startswith(sentence) and said.err.count("\n") == 1


PUBLISHED = [
    *published.MEGATRON,
    *published.LLAMA,
    *published.LATER,
    *published.SHARDED,
    *published.RING,
    *published.EXPERTS,
]


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_the_predicted_utilisation_is_within_20_percent_of_the_published_one(run: published.Run):
    assert abs(run.error()) < 0.20


def test_the_mean_error_of_a_table_is_under_10_percent_but_for_runs_with_a_ring():
    for runs in (published.MEGATRON, published.LLAMA, published.LATER, published.SHARDED, published.EXPERTS):
        assert statistics.mean(abs(run.error()) for run in runs) < 0.10
    # These are predicted too low by about the same share (published_runs.py).
    errors = [run.error() for run in published.RING]
    assert min(errors) > -0.17 and max(errors) - min(errors) < 0.06 and max(errors) < 0


def test_a_published_run_fits_into_its_devices_and_those_of_megatron_only_with_recomputation():
    for run in (run for run in PUBLISHED if run not in published.LATER):
        sizes = (
            replace(run.sizes, zero=2) if run in published.LLAMA else run.sizes
        )  # it also divides the gradients
        assert predict_memory(run.shape, sizes, run.batch).total < run.machine.memory_bytes, run.name
    for run in published.MEGATRON:
        memory = predict_memory(run.shape, replace(run.sizes, recompute=False), run.batch)
        assert memory.total > run.machine.memory_bytes, run.name
