"""What the planner predicts on paper is what ranks of this machine hold."""

import pytest
import torch

from comm.cost import Link
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.planner.machine import this_machine
from hybrid_parallel.planner.memory import fullest_ranks, parameters_of, predict_memory
from hybrid_parallel.planner.shapes import shape_of_config
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from lab.trace.memory import live_bytes

WAYS = [
    ParallelSizes(data=4, zero=1),
    ParallelSizes(tensor=4),
    ParallelSizes(pipeline=4, microbatches=2),
    ParallelSizes(pipeline=2, tensor=2),
]
CONFIG = GPTConfig.named("tiny", num_layers=4)
SHAPE = shape_of_config(CONFIG)


def test_a_rank_holds_the_parameters_and_the_optimizer_state_that_are_predicted_and_no_more():
    def held(cluster: Cluster) -> list[tuple[int, int]]:
        found = []
        for sizes in WAYS:
            tokens = torch.zeros(8 // sizes.data, 33, dtype=torch.int64)
            example = tokens[: len(tokens) // sizes.microbatches, :-1]
            hybrid = HybridParallel(GPT(CONFIG), Mesh(cluster, sizes), example)
            hybrid.optimizer.zero_grad()
            hybrid.backward(tokens[:, :-1], tokens[:, 1:])
            hybrid.optimizer.step()
            state = [tensor for each in hybrid.optimizer.state.values() for tensor in each.values()]
            by_class = live_bytes({"optimizer": state, "parameters": hybrid.plain.parameters()})
            found.append((by_class["parameters"], by_class["optimizer"]))
        return found

    for sizes, *of_ranks in zip(WAYS, *run_ranks(held, 4), strict=True):
        numbers = max(parameters_of(SHAPE, sizes, rank) for rank in fullest_ranks(sizes))
        expected = (4 * numbers, 8 * numbers / (sizes.data if sizes.zero else 1))
        assert max(of_ranks) == pytest.approx(expected, rel=0.02), sizes


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_parameters_gradients_and_optimizer_state_are_those_of_the_plan_in_both_precisions(precision):
    ways = [ParallelSizes(data=2, zero=zero, precision=precision) for zero in (0, 1, 2, 3)]
    ways += [ParallelSizes(tensor=2, precision=precision)]

    def held(cluster: Cluster) -> list[list[int]]:
        found = []
        for sizes in ways:
            tokens = torch.zeros(8 // sizes.data, 33, dtype=torch.int64)
            hybrid = HybridParallel(GPT(CONFIG), Mesh(cluster, sizes), tokens[:, :-1])
            hybrid.optimizer.zero_grad()
            hybrid.backward(tokens[:, :-1], tokens[:, 1:])
            [group] = hybrid.optimizer.param_groups
            parameters = [*hybrid.plain.parameters(), *group["params"]]
            gradients = live_bytes({"gradients": [each.grad for each in parameters]})["gradients"]
            hybrid.optimizer.step()
            state = [tensor for each in hybrid.optimizer.state.values() for tensor in each.values()]
            by_class = live_bytes({"optimizer": state, "parameters": parameters})
            found.append([by_class["parameters"], gradients, by_class["optimizer"]])
        return found

    machine = this_machine(2, Link(0.0, 0.0))
    for sizes, *of_ranks in zip(ways, *run_ranks(held, 2), strict=True):
        plan = predict_memory(SHAPE, sizes, 8, autocast=machine.autocast)
        expected = [plan.parameters, plan.gradients, plan.optimizer_state]
        assert [max(each) for each in zip(*of_ranks, strict=True)] == pytest.approx(expected, rel=0.02), sizes
