"""Test that the executor's times are those of the link and of the device."""

import time

import torch
from torch import nn

from comm import collectives
from comm.cost import Link
from comm.wire import slow_link
from lab.cluster import Cluster
from lab.models.model import MLP, loss_of
from lab.ranks import run_ranks
from lab.trace.timeline import recorded, start_recording, stop_recording
from pipeline_parallel.analysis import from_events
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.executor import Executor
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_v
from pipeline_parallel.stage_runner import AutogradRunner
from tests.lab.simulated_gpu import simulated_gpu
from tests.pipeline_parallel.equivalence import (
    vectors,
)


def test_a_message_over_a_slow_link_arrives_no_sooner_than_the_simulator_says():
    """A clock replaces computing; rank 0 begins and ends the step. There is a lower limit only."""
    tick, link = 0.002, Link(0.01, 1e-6)

    def measure(cluster: Cluster) -> list[float]:
        x, y = vectors(3)
        seconds = []
        for table in (one_f_one_b(2, 3), interleaved_1f1b(2, 3), zb_v(2, 3)):
            pipeline = Pipeline(MLP([5] * 5).double(), table, loss_of, x[:1], tick=tick)
            with slow_link.slowed(link):
                collectives.barrier(pattern="torch")
                start = time.perf_counter()
                pipeline.step(x, y)
                seconds.append(time.perf_counter() - start)
        return seconds

    taken, _ = run_ranks(measure, 2)
    for table, seconds in zip((one_f_one_b(2, 3), interleaved_1f1b(2, 3), zb_v(2, 3)), taken, strict=True):
        stages = 1 + max(action.stage for row in table for action in row)
        chunks = stages // 2
        costs = Costs.equal(stages, *[tick / chunks] * 3)
        simulation = simulate(table, costs, link, 5 * 8)
        of_rank_0 = simulation.rows[0][-1].end
        assert seconds >= 0.98 * of_rank_0 > 3 * link.alpha, (seconds, of_rank_0)


def test_on_a_gpu_an_action_takes_what_the_device_computes_and_not_the_launch():
    def measure(cluster: Cluster) -> tuple[float, float, Costs]:
        x, y = torch.zeros(2, 1), torch.zeros(2)
        with simulated_gpu() as gpu:

            class Launching(nn.Module):
                def forward(self, x):
                    gpu.launch(3)
                    x.register_hook(lambda _: gpu.launch(8))
                    return 2 * x

            boundaries = dict.fromkeys((0, 1), torch.empty(1, 1, device="meta"))
            runners = {0: AutogradRunner(Launching(), 2, lambda y, _: y.sum())}
            executor = Executor(gpipe(1, 2), runners, boundaries, rank=0)
            start_recording(gpu.device)
            executor.step(x.requires_grad_(), y)
            stop_recording()
            actions = [event for event in recorded() if "action" in event.args]
            return (
                from_events.makespan(actions),
                from_events.bubble(actions, 1),
                from_events.costs(actions, 1),
            )

    (found,) = run_ranks(measure, 1)
    assert found == (0.022, 0.0, Costs((0.003,), (0.004,), (0.004,)))
