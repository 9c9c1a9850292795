"""Test that the bytes which each stage of ZeRO holds and sends equal the formulas."""

import json
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from comm.cost import Link
from comm.wire import slow_link
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from lab.trace.memory import live_bytes
from tests.equivalence import Trained
from tests.on_ranks import on_ranks
from tests.tasks import Blocks
from tests.training.attempts import train
from tests.wrappers import Wrapper, for_each, named, select
from zero.memory import Held, formula, of_one_process, owned, shares_of
from zero.shards import FlatLayout, ParameterShard

STAGES = select(lesson="zero", by_torch=False, overlaps=True)
HELD = ("parameters", "gradients", "optimizer_state")


def total(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return model(x).sum()


def test_the_stages_send_2_2_and_nearly_3_times_the_parameters():
    n = 4

    def count(cluster: Cluster) -> None:
        for wrapper in STAGES:
            module = Blocks()  # divisible by 4, so nothing is padded, and three equal blocks, without a root
            num_bytes = sum(p.nbytes for p in module.parameters())
            ours = Trained(wrapper, module, "adamw")
            for microbatches in (1, 3):
                LEDGER.clear()
                ours.optimizer.zero_grad()
                ours.accumulate(total, (torch.ones(3, 8), torch.ones(3)), microbatches)
                ours.optimizer.step()
                sent = {"reduce_scatter": 0, "all_gather": 0}
                for entry, traffic in LEDGER.rows().items():
                    if entry.op in sent and entry.pattern != "header":
                        sent[entry.op] += traffic.bytes_sent
                each = num_bytes * (n - 1) // n
                reductions = 1 if wrapper.stage == 1 else microbatches
                gathered = each * 5 // 3 * microbatches if wrapper.stage == 3 else each
                assert sent == {"reduce_scatter": each * reductions, "all_gather": gathered}

    run_ranks(count, n)


def test_between_steps_a_rank_holds_what_the_formula_says_and_nothing_else():
    def measure(cluster: Cluster, wrapper: Wrapper) -> None:
        module = Blocks()
        P = sum(p.nbytes for p in module.parameters())
        before = live_bytes({})["other"] - P
        ours = Trained(wrapper, module, "adamw")
        x = torch.ones(2, 8)
        for _ in range(2):
            ours.optimizer.zero_grad()
            ours.accumulate(total, (x, x), 1)
            ours.optimizer.step()
        stand_ins = 4 * len(module.blocks) if wrapper.stage == 3 else 0  # a NaN for what is freed
        counters = 4 * len(ours.syncing.parameter_shards)
        held = live_bytes({})["other"] - before - x.nbytes - counters - stand_ins
        n = cluster.world_size
        divided = {1: (1, 1, n), 2: (1, n, n), 3: (n, n, n)}[wrapper.stage]
        assert held == sum(size // by for size, by in zip((P, P, 2 * P), divided, strict=True)), wrapper

    for wrapper in STAGES:
        run_ranks(measure, 2, wrapper)


@on_ranks(2, timeout=20)
def test_at_most_three_buckets_of_gradients_are_alive(cluster: Cluster):
    module = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(7))
    ours = Trained(named("zero2"), module, bucket_mb=1e-6)
    alive: list[int] = []

    def look(_: Tensor) -> None:
        buckets = ours.optimizer.buckets
        alive.append(sum(bucket.gradients.untyped_storage().size() > 0 for bucket in buckets))

    for layer in module:
        layer.weight.register_post_accumulate_grad_hook(look)
    with slow_link.slowed(Link(0.003, 0.0)):
        nn.Sequential(*module)(torch.ones(2, 8)).sum().backward()
        ours.optimizer.finish_gradient_sync()
    assert 1 <= max(alive) <= 3, f"{max(alive)} of {len(ours.optimizer.buckets)}"


def test_the_report_of_a_script_has_what_a_rank_holds_beside_the_formula(tmp_path):
    ways: dict[str, dict] = {
        "zero1": {},
        "zero2": {"bucket_mb": 0.02},
        "zero3": {"link": "1gbit", "trace": str(tmp_path)},
        "recomputed": {"recompute": True},
        "half": {"bf16": True},
        "fsdp": {},
    }

    def work(cluster: Cluster) -> dict[str, dict]:
        return {
            name: train(cluster, name if "ze" in name or name == "fsdp" else "zero3", steps=1, **way)
            for name, way in ways.items()
        }

    stages = {wrapper.name: wrapper.stage for wrapper in STAGES}
    for by_name in run_ranks(work, 2):
        full = by_name["zero1"]["formula_parameters_bytes"]
        for name, report in by_name.items():
            held, formula = (sum(report[f"{how}{what}_bytes"] for what in HELD) for how in ("", "formula_"))
            assert held == formula + report["padding_bytes"], name
            first_stages = (3, 2, 1) if name in stages else (0, 0, 0)
            for what, first, times in zip(HELD, first_stages, (1, 1, 2), strict=True):  # AdamW keeps two
                is_divided = name not in stages or stages[name] >= first
                expected = times * full / (2 if is_divided else 1)
                assert report[f"{what}_bytes"] == pytest.approx(expected, rel=2e-2), (name, what)
        activations = {name: report["activations_bytes"] for name, report in by_name.items()}
        assert activations["recomputed"] < 0.6 * activations["zero3"]
        assert activations["half"] < 0.7 * activations["zero3"]
    kinds = {row.get("cat") for row in json.loads(next(tmp_path.glob("*.json")).read_text())["traceEvents"]}
    assert {"forward", "backward", "communication", "optimizer", "launch"} <= kinds


@for_each(STAGES)
@on_ranks(2)
def test_a_rank_holds_an_nth_of_what_its_stage_divides_and_sends_little(cluster: Cluster, wrapper: Wrapper):
    """A learner's stage may hold and send less than the formulas, which the lesson's own equals exactly."""
    most_sent = 3.0 if wrapper.stage == 3 else 2.0  # times (n-1)/n of the parameters' bytes
    n, module = cluster.world_size, nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    full = sum(parameter.nbytes for parameter in module.parameters())
    before = live_bytes({})["other"] - full
    ours = Trained(wrapper, module, "adamw")
    for _ in range(2):
        LEDGER.clear()
        ours.optimizer.zero_grad()
        ours.accumulate(total, (torch.ones(2, 64), torch.ones(2)))
        ours.optimizer.step()
    rows = LEDGER.rows().items()
    sent = sum(row.bytes_sent for entry, row in rows if entry.pattern != "header") / full
    held = (live_bytes({})["other"] - before) / full
    least = sum(astuple(formula(wrapper.stage, Held(1.0, 1.0, 2.0), n)))
    assert held <= 1.02 * least, (
        f"between steps a rank of {n} holds {held:.2f} times the parameters' bytes, and not {least:.2f}"
    )
    assert sent <= 1.02 * most_sent * (n - 1) / n, (
        f"in a step a rank of {n} sends {sent:.2f} times the parameters' bytes, and not "
        f"{most_sent:g} (n-1)/n = {most_sent * (n - 1) / n:.2f}"
    )


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
