"""Compare each technique on fake GPUs, with slow operations, with one process.

Each test runs three times: operations of different groups begin in another order each time.
"""

import os
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from tests import tasks
from tests.equivalence import compare_with_one_process
from tests.fake_gpu.conftest import REAL
from tests.fake_gpu.ranks import SHORT, on_gpus
from tests.pipeline_parallel import equivalence as pipelines
from tests.run_modes import train
from tests.tasks import Task
from tests.wrappers import Wrapper, for_each, select

SLOW = "0.002"  # seconds


@pytest.fixture(autouse=True, params=["1"] if REAL in os.environ else ["1", "2", "3"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ORDER", request.param)


def on(device: torch.device, task: Task) -> Task:
    """Return the task with its model and its batch on a device."""
    batch = lambda n: tuple(part.to(device) for part in task.batch(n))  # noqa: E731
    return Task(lambda seed: task.make(seed).to(device), task.loss, batch)


@for_each(select(lesson="data_parallel"))
def test_data_parallel_equals_one_process(wrapper: Wrapper):
    def compare(cluster: Cluster) -> None:
        for task in (tasks.BRANCHES, tasks.TEXT):
            compare_with_one_process(cluster, wrapper, on(cluster.device, task))

    on_gpus(compare, FAKE_SLOW=SLOW)


@for_each(select(lesson="zero", by_torch=False, overlaps=True))
def test_zero_equals_one_process(wrapper: Wrapper):
    options = {} if wrapper.stage == 3 else {"bucket_mb": 0.01}

    def compare(cluster: Cluster) -> None:
        task = on(cluster.device, tasks.DEEP)
        compare_with_one_process(cluster, wrapper, task, (1, 3), clip=0.5, **options)

    on_gpus(compare, FAKE_SLOW=SLOW)


@for_each([*select(lesson="tensor_parallel"), *select(lesson="context_parallel")])
def test_a_divided_batch_or_model_equals_one_process(wrapper: Wrapper):
    def compare(cluster: Cluster) -> None:
        if not wrapper.by_torch or dist.get_backend() == "nccl":  # DTensors need it
            clip = 0.5 if wrapper.clips else None
            task = on(cluster.device, tasks.heads_task(num_layers=2))
            compare_with_one_process(cluster, wrapper, task, (1, 1, 1), clip=clip)

    on_gpus(compare, FAKE_SLOW=SLOW)


@pytest.mark.parametrize(("schedule", "chunks"), pipelines.ALL_SCHEDULES)
def test_a_pipeline_equals_one_process(schedule: str, chunks: int, ranks: int = 3):
    def compare(cluster: Cluster) -> None:
        make = lambda: pipelines.gpt(num_layers=max(3, chunks * ranks - 2))  # noqa: E731
        microbatches = 2 * cluster.world_size
        pipelines.compare_schedule(cluster, schedule, microbatches, make, pipelines.text, chunks)

    on_gpus(compare, ranks=ranks, FAKE_SLOW=SLOW)


@pytest.mark.parametrize(("schedule", "lesson"), pipelines.BY_HAND.items())
def test_a_pipeline_by_hand_equals_one_process(schedule: str, lesson: type):
    def compare(cluster: Cluster) -> None:
        make = lambda: pipelines.gpt(num_layers=3)  # noqa: E731
        pipelines.compare_schedule(cluster, schedule, 4, make, pipelines.text, by_hand=lesson)

    on_gpus(compare, ranks=3, FAKE_SLOW=SLOW)


def losses(cluster: Cluster, run: str) -> list[float]:
    report = train(cluster, *run.split(), *SHORT, "--steps", "7")
    return [report[name] for name in ("first_loss", "last_loss", "validation_loss")]


@cache
def losses_on_cpus(ranks: int, run: str) -> list[Any]:
    return [pytest.approx(expected, rel=1e-4) for expected in run_ranks(losses, ranks, run)]


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        *((f"data_parallel_compressed --compress {how}", 2) for how in ("bf16", "int8", "topk", "powersgd")),
        ("diloco_plain --sync-every 7", 2),
        ("diloco --sync-every 4 --fragments 4 --delay 2 --wire-dtype int8", 2),
        ("expert_parallel", 2),
        ("hsdp --shard-size 2", 4),
        ("hybrid --pipeline 2 --data 2 --zero 1", 4),
    ],
)
def test_a_script_trains_on_gpus_as_on_cpus(run: str, ranks: int):
    assert on_gpus(losses, run, ranks=ranks, FAKE_SLOW=SLOW) == losses_on_cpus(ranks, run)


@pytest.mark.skipif(REAL not in os.environ, reason="a fake GPU computes on the host")
@pytest.mark.parametrize("lesson", [OverlapDataParallel, BucketDataParallel])
def test_the_host_runs_ahead_of_a_real_gpu_in_a_step_of_an_overlapping_wrapper(lesson: type[nn.Module]):
    def train(cluster: Cluster) -> None:
        model = lesson(tasks.gpt(0).float().to(cluster.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = on(cluster.device, tasks.TEXT).batch(1)
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            model.finish_gradient_sync()
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")

    on_gpus(train, ranks=1)
