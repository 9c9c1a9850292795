"""The planner counts what a context axis holds, computes and sends."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm import cost
from comm.cost import Link
from context_parallel.expected_traffic import ring_layer
from context_parallel.parallel_model import ContextParallel
from context_parallel.predict import ring_seconds, step_pairs
from context_parallel.sequence_cut import SequenceCut
from context_parallel.train_all_to_all_attention import all_to_all_attention
from context_parallel.train_ring_attention import ring_attention
from hybrid_parallel.planner.machine import MACHINES, Device, Machine
from hybrid_parallel.planner.measured import Handling
from hybrid_parallel.planner.memory_model import predict_memory
from hybrid_parallel.planner.seconds import Seconds
from hybrid_parallel.planner.shapes import SHAPES, ModelShape, shape_of_config
from hybrid_parallel.planner.time_model import TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from lab.trace.memory import saved_activations

CLOCK = Device("clock", 1e12, {"float32": 1.0, "bf16": 1.0}, 1e30, 1.0, 1.0, 1.0, 0.0)
H100 = MACHINES["h100"]
# One layer; of 8 tokens each of 2 ranks has 4, with 4 numbers in each query, key and value.
TINY = ModelShape(1, width=4, num_heads=2, vocab_size=1, sequence_length=8, num_kv_heads=2)
CONFIG = GPTConfig(64, 64, num_layers=4, num_heads=8, width=128)


def machine(beta: float, alpha: float = 0.0, **changes: object) -> Machine:
    return Machine(CLOCK, 8, Link(alpha, beta), Link(alpha, beta), **changes)


def predict(shape: ModelShape, sizes: ParallelSizes, where: Machine, batch: int = 1) -> Seconds:
    return TimeModel(shape, where, batch).predict(sizes)


def test_a_ring_shows_what_is_longer_than_the_attention_to_a_block_and_the_last_gradients():
    # Attention takes 4 * 4 * 8 * 4 / 2 = 256 operations on a rank, 128 for each of two blocks. A message has
    # 4 tokens * 2 * 4 numbers * 4 bytes = 128 bytes.
    ring = ParallelSizes(context=2)
    assert predict(TINY, ring, machine(2.0)).context == pytest.approx((256 - 128) + (256 - 256) + 256)
    assert predict(TINY, ring, machine(3.0)).context == pytest.approx((384 - 128) + (384 - 256) + 384)
    assert predict(TINY, ring, machine(0.5)).context == pytest.approx(64)  # all but the last is hidden


def test_a_ring_hides_more_behind_attention_that_shares_a_core():
    shared = Machine(CLOCK, 4, Link(0.0, 3.0), Link(0.0, 3.0), cores=2)
    # A block takes 256 seconds instead of 128, and a message still 384.
    assert predict(TINY, ParallelSizes(context=2), shared).context == pytest.approx((384 - 256) + 0 + 384)


def test_neighbours_of_a_ring_are_as_far_apart_as_the_tensor_axis_is_long():
    nodes, shape = Machine(CLOCK, 2, Link(0.0, 0.0), Link(0.0, 1e6)), replace(TINY, num_layers=2)
    for attention in ("ring", "all_to_all"):
        within, across = (
            predict(shape, ParallelSizes(context=2, tensor=t, attention=attention), nodes) for t in (1, 2)
        )
        assert within.context == 0 < across.context
    # Stages lie beyond all replicas: those of 2 stages are in different nodes.
    assert predict(shape, ParallelSizes(pipeline=2, context=2), nodes).bubble > 1e6


@pytest.mark.parametrize("beta", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_a_ring_takes_what_the_lesson_predicts_for_the_zigzag_cut(ranks: int, beta: float):
    shape, link = replace(TINY, sequence_length=240), Link(5.0, beta)
    seconds = predict(shape, ParallelSizes(context=ranks), machine(beta, 5.0))
    pairs = step_pairs(SequenceCut.zigzag(240, ranks))
    per_pair = 4 * shape.query_width
    attention = 3 * 240 / ranks * 240 / 2 * per_pair
    expected = ring_seconds(pairs, per_pair, 240 // ranks * 2 * shape.kv_width * 4, link)
    assert seconds.context + attention == pytest.approx(expected, rel=0.02)


@given(st.integers(2, 8), st.sampled_from([1, 2]), st.sampled_from(["float32", "bf16"]))
def test_a_slow_ring_takes_the_bytes_of_the_lessons_formula(ranks: int, kv_heads: int, precision):
    shape = replace(TINY, sequence_length=16 * ranks, num_kv_heads=kv_heads)
    cut = SequenceCut.zigzag(16 * ranks, ranks)
    layer = ring_layer(SimpleNamespace(rank=0, size=ranks, cut=cut), 2, kv_heads, 4)
    slow, sizes = machine(1e6), ParallelSizes(context=ranks, precision=precision)
    waiting = predict(shape, sizes, slow).context
    sent = sum(traffic.bytes_sent for traffic in layer) * (1 if precision == "float32" else 0.5)
    assert waiting == pytest.approx(sent * 1e6, rel=1e-2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_to_alls_take_the_bytes_of_the_lessons_formula_and_hide_nothing(ranks: int):
    shape = ModelShape(3, width=64, num_heads=16, vocab_size=1, sequence_length=64, num_kv_heads=8)
    sizes = ParallelSizes(context=ranks, attention="all_to_all")
    tokens, numbers = 64 * 5, shape.query_width + shape.kv_width
    sent = 4 * (ranks - 1) / ranks**2 * tokens * numbers * 4
    assert predict(shape, sizes, machine(1.0), 5).context == pytest.approx(3 * sent)
    assert predict(shape, sizes, machine(1e-9), 5).context == pytest.approx(3 * sent * 1e-9)
    again = replace(sizes, recompute=True)  # the forward sends once more
    assert predict(shape, again, machine(1.0), 5).context == pytest.approx(1.5 * 3 * sent)


def test_a_program_that_gathers_keys_waits_for_all_of_them():
    where = machine(1.0, gathers_keys=True)
    gather = cost.seconds("all_gather", "ring", 8 * 2 * 4 * 4, 4, where.inner)
    assert predict(TINY, ParallelSizes(context=4), where).context == pytest.approx(2 * gather)


def test_the_tensor_axis_divides_what_the_context_axis_sends():
    shape, slow = replace(TINY, num_heads=4, num_kv_heads=4), machine(1e6)
    for attention in ("ring", "all_to_all"):
        alone, both = (
            predict(shape, ParallelSizes(context=2, tensor=t, attention=attention), slow) for t in (1, 2)
        )
        assert both.context == pytest.approx(alone.context / 2, rel=1e-4)


def test_each_rank_computes_its_share_whatever_cuts_the_examples():
    alone, *cut = (
        predict(TINY, sizes, machine(0.0), 2).compute
        for sizes in (ParallelSizes(), ParallelSizes(data=2), ParallelSizes(context=2))
    )
    assert cut == [pytest.approx(alone / 2)] * 2


def test_a_ring_adds_results_in_float32_and_an_all_to_all_copies():
    slow = replace(machine(0.0), device=replace(CLOCK, bandwidth=1.0))
    plain, ring, exchanged = (
        predict(TINY, sizes, slow, 2).compute
        for sizes in (
            ParallelSizes(data=2),
            ParallelSizes(context=2),
            ParallelSizes(context=2, attention="all_to_all"),
        )
    )
    numbers = 2 * 4 * 4  # of the queries of a rank; keys and values have twice as many
    # The plain model has 8 tokens on each rank, too. Two blocks; 12 bytes for each number that is added.
    assert ring - plain == pytest.approx(2 * 12 * (numbers + numbers + 2 * numbers))
    assert exchanged - plain == pytest.approx(2 * 2 * 2 * (numbers + 2 * numbers + numbers) * 4)


def test_messages_between_nodes_go_through_one_card_each():
    where = Machine(CLOCK, 8, Link(1.0, 1.0), Link(5.0, 10.0))
    assert where.message_link(8, 1) == where.pairwise_link(4, 2) == where.inner
    assert where.message_link(16, 1) == where.message_link(2, 8) == where.outer
    # Of 15 messages of an all-to-all, 7 stay in the node; with a stride of 4, one of 7.
    assert where.pairwise_link(16, 1) == Link(5.0, (7 * 1 + 8 * 10) / 15)
    assert where.pairwise_link(8, 4) == Link(5.0, (1 * 1 + 6 * 10) / 7)


@pytest.mark.parametrize("cores", [4, 2])
@pytest.mark.parametrize("attention", ["ring", "all_to_all"])
def test_messages_of_the_context_axis_need_a_core_as_a_part_of_their_time(attention: str, cores: int):
    shape, sizes = replace(TINY, num_heads=4, num_kv_heads=4), ParallelSizes(context=4, attention=attention)
    slow = Machine(CLOCK, 4, Link(0.0, 1e3), Link(0.0, 1e3), cores)
    costs = (Handling(), Handling(call=7.0, byte=2.0))
    without, handled = (predict(shape, sizes, replace(slow, handling=cost)) for cost in costs)
    block = 2 * 2 * 4 * 4  # bytes of the keys and values of two tokens
    ring = 9 * (7.0 + 2.0 * block)
    exchanges = 4 * 7.0 + 2 * 3 / 4 * 2.0 * (block + block)  # q, k, v and y: twice as much as k and v
    work = ring if attention == "ring" else exchanges
    assert handled.compute - without.compute == pytest.approx(work * 4 / cores)
    assert without.context - handled.context == pytest.approx(work)


def test_one_stage_computes_while_another_one_waits_for_tokens():
    axes = {"pipeline": 2, "context": 2, "attention": "all_to_all"}
    sizes = ParallelSizes(**axes, microbatches=8, schedule="zb_h1")
    own, shared = (
        predict(replace(TINY, num_layers=2), sizes, Machine(CLOCK, 4, *[Link(0.0, 1.0)] * 2, cores=n), 8)
        for n in (4, 2)
    )
    assert own.bubble > 0 == shared.bubble and 0 < shared.context < own.context / 2


@pytest.mark.parametrize("attention", ["ring", "all_to_all"])
def test_a_faster_link_never_makes_the_context_axis_slower(attention: str):
    shape = replace(SHAPES["llama-3-8b"], sequence_length=32_768)
    sizes = ParallelSizes(context=8, attention=attention, precision="bf16")
    waits = [
        predict(shape, sizes, replace(H100, inner=Link(0.0, beta))).context for beta in (1e-8, 1e-9, 1e-10)
    ]
    assert waits == sorted(waits, reverse=True) and waits[0] > waits[-1] > 0


@pytest.mark.parametrize("attention", ["ring", "all_to_all"])
def test_attention_over_a_context_axis_keeps_what_is_predicted(attention: str):
    how = {"ring": (ring_attention, SequenceCut.zigzag)}
    how["all_to_all"] = all_to_all_attention, SequenceCut.contiguous

    def kept(_: Cluster) -> int:
        model, tokens = ContextParallel(GPT(CONFIG), *how[attention]), torch.zeros(4, 64, dtype=torch.int64)
        with saved_activations(model.parameters) as saved:
            logits = model(tokens)
            model.loss(logits, tokens)
        return saved.bytes + logits.nbytes

    plan = predict_memory(shape_of_config(CONFIG), ParallelSizes(context=2, attention=attention), 4)
    for found in run_ranks(kept, 2):
        assert plan.activations + plan.temporary == pytest.approx(found, rel=0.01)
