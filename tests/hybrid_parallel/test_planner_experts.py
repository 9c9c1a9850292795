"""The planner counts what ranks with divided experts hold and send."""

from dataclasses import replace

import pytest
import torch

from comm import cost
from comm.cost import Link
from expert_parallel.config import MoEConfig
from expert_parallel.groups import form_groups
from expert_parallel.train_moe import ExpertParallel
from hybrid_parallel.planner.machine import Device, Machine
from hybrid_parallel.planner.measured import Handling
from hybrid_parallel.planner.memory_model import experts_of, parameters_of, predict_memory
from hybrid_parallel.planner.seconds import Seconds
from hybrid_parallel.planner.shapes import ModelShape, shape_of_config
from hybrid_parallel.planner.time_model import TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.ranks import run_ranks
from lab.trace.memory import saved_activations

CLOCK = Device("clock", 1e12, {"float32": 1.0, "bf16": 1.0}, 1e30, 1.0, 1.0, 1.0, 0.0)
# One layer. An expert's linear layers have 32 numbers between them, and each token passes two experts.
EXPERTS = ModelShape(1, width=8, num_heads=2, vocab_size=16, sequence_length=4, experts=4, active_experts=2)
CONFIG = GPTConfig(64, 64, num_layers=4, num_heads=8, width=128)


def machine(beta: float, alpha: float = 0.0) -> Machine:
    return Machine(CLOCK, 8, Link(alpha, beta), Link(alpha, beta))


def predict(shape: ModelShape, sizes: ParallelSizes, where: Machine, batch: int = 1) -> Seconds:
    return TimeModel(shape, where, batch).predict(sizes)


def test_expert_ranks_divide_experts_and_nothing_else():
    # Attention has 4 * 8 * 8 weights and 32 biases, norms have 32 and the router 4 * 8 numbers; an expert has
    # 2 * 8 * 32 weights and 32 + 8 biases. The embedding has 16 * 8.
    dense, expert = 256 + 32 + 32 + 32 + 128, 512 + 40
    for e in (1, 2, 4):
        assert parameters_of(EXPERTS, ParallelSizes(data=4, expert_ranks=e), 0) == dense + 4 * expert / e
    # The tensor axis divides all but norms, the router, the bias after attention, and 8 biases of an expert.
    both = ParallelSizes(data=2, tensor=2, expert_ranks=2)
    whole = 32 + 32 + 8
    assert parameters_of(EXPERTS, both, 0) == whole + (dense - whole) / 2 + 4 / 2 * ((expert - 8) / 2 + 8)
    assert experts_of(replace(EXPERTS, experts=1, active_experts=1), ParallelSizes(data=2), 0) == 0


def test_ranks_with_experts_hold_the_parameters_and_keep_the_activations_that_are_predicted():
    def held(_: Cluster, expert_ranks: int) -> tuple[int, int]:
        model = ExpertParallel(GPT(CONFIG), MoEConfig(4, 2), form_groups(expert_ranks))
        tokens = torch.arange(128).view(2, 64) % 64
        with saved_activations(model.parameters) as saved:
            logits = model(tokens)
            loss_of(logits, tokens)
        return sum(parameter.numel() for parameter in model.parameters()), saved.bytes + logits.nbytes

    shape = shape_of_config(CONFIG, 4, 2)
    for expert_ranks in (1, 2):
        plan = predict_memory(shape, ParallelSizes(data=2, expert_ranks=expert_ranks), 4)
        numbers, kept = zip(*run_ranks(held, 2, expert_ranks), strict=True)
        assert [plan.parameters / 4 + 2 * 128] * 2 == list(numbers)  # the final norm is left out
        # The router decides which rank has more tokens; the mean is known.
        assert plan.activations + plan.temporary == pytest.approx(sum(kept) / 2, rel=0.015)


def test_a_layer_sends_its_tokens_to_their_experts_and_back_in_both_passes():
    shape, e, batch = replace(EXPERTS, num_layers=3), 2, 8
    tokens = batch * 4 / 4
    exchanges = 4 * (e - 1) / e * tokens * 2 * 8 * 4  # two experts for each token, 8 numbers of 4 bytes
    counts = 3 / 4 * (4 * 4 * 8)  # of 4 experts on 4 ranks, 8 bytes each
    sizes = ParallelSizes(data=4, expert_ranks=e)
    assert predict(shape, sizes, machine(1.0), batch).experts == pytest.approx(3 * (exchanges + counts))
    again = predict(shape, replace(sizes, recompute=True), machine(1.0), batch).experts
    assert again == pytest.approx(3 * (1.5 * exchanges + 2 * counts))
    # Without divided experts only the counts are gathered; the rounds of a small gather are log2 n, twice.
    whole = ParallelSizes(data=4)
    assert predict(shape, whole, machine(1.0), batch).experts == pytest.approx(3 * counts)
    assert predict(shape, whole, machine(0.0, 1.0), batch).experts == pytest.approx(3 * 4)
    assert predict(shape, ParallelSizes(), machine(1.0, 1.0), batch).experts == 0


def test_the_replicas_of_an_expert_reduce_its_gradients():
    shape, where = replace(EXPERTS, num_layers=2), machine(1.0)
    for e in (1, 2, 4):
        sizes = ParallelSizes(pipeline=2, data=4, expert_ranks=e)  # a pipeline hides nothing
        own = experts_of(shape, sizes, 0)
        dense = max(parameters_of(shape, sizes, rank) for rank in (0, 1)) - own
        reductions = ((dense, 4), (own, 4 // e))
        expected = sum(cost.seconds("all_reduce", "ring", int(4 * n), r, where.inner) for n, r in reductions)
        assert predict(shape, sizes, where, 8).data == pytest.approx(expected)


def test_exchanges_with_experts_need_a_core_as_a_part_of_their_time():
    slow = Machine(CLOCK, 4, Link(0.0, 1e3), Link(0.0, 1e3), 2)
    costs = (Handling(), Handling(call=7.0, byte=2.0))
    sizes = ParallelSizes(data=4, expert_ranks=2)
    without, handled = (predict(EXPERTS, sizes, replace(slow, handling=cost), 4) for cost in costs)
    work = 5 * 7.0 + 2.0 * (4 * 1 / 2 * 4 * 2 * 8 * 4 + 3 / 4 * 4 * 4 * 8)
    assert handled.compute - without.compute == pytest.approx(work * 2)  # 4 ranks on 2 cores
    assert without.experts - handled.experts == pytest.approx(work)


def test_tokens_are_copied_weighted_and_added_up_on_their_way_to_experts():
    dense = replace(EXPERTS, experts=1, active_experts=1, feed_forward_width=2 * 32)
    slow = replace(machine(0.0), device=replace(CLOCK, bandwidth=1.0))
    # Both have 64 numbers between the linear layers of a token. Two experts get 8 numbers each.
    one, two = (predict(shape, ParallelSizes(), slow).compute for shape in (dense, EXPERTS))
    router = 6 * 4 * 8 * 4
    assert two - one == pytest.approx(3 * 4 * 2 * 7 * 8 * 4 + router)


def test_a_core_reads_the_weights_of_its_own_experts_alone():
    core = Machine(replace(CLOCK, bandwidth=1.0), 4, Link(0.0, 0.0), Link(0.0, 0.0), cores=4)
    one, two = (predict(EXPERTS, ParallelSizes(data=4, expert_ranks=e), core, 4).compute for e in (1, 2))
    assert one - two == pytest.approx(3 * 2 * EXPERTS.expert_weights * 4)


def test_the_gradients_of_experts_weights_hide_reductions_too():
    hiding = Machine(CLOCK, 4, Link(0.0, 1e4), Link(0.0, 1e4), 4, hides_reductions=True)
    shown, hidden = (
        predict(EXPERTS, ParallelSizes(tensor=2), replace(hiding, hides_reductions=h)).tensor for h in (0, 1)
    )
    columns = 8 * (3 * 8 + 2 * 32)  # weights of queries, keys and values, and of two experts
    compute = EXPERTS.active_weights * 2 * 4 / 2 + 4 * 4 * 4 * 8 / 2 / 2
    assert shown - hidden == pytest.approx(columns / EXPERTS.active_weights * compute, rel=1e-6)


def test_a_tensor_axis_adds_up_the_output_of_each_expert_of_a_token():
    alone = replace(EXPERTS, experts=1, active_experts=1)
    one, two = (predict(shape, ParallelSizes(tensor=2), machine(1.0)).tensor for shape in (alone, EXPERTS))
    assert two == pytest.approx(one * 3 / 2)
