"""Test how often the host waits for its GPU in a step: while it waits, it launches no work."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from lab.cluster import Cluster
from tests.fake_gpu.device import extension
from tests.fake_gpu.ranks import SHORT, on_gpus
from tests.run_modes import train
from training.run import Run

LAYERS = 2  # of the model


@pytest.mark.parametrize(
    ("run", "most"),
    [  # one wait is for the search for gradients that are not finite
        ("data_parallel_naive", 1),
        ("data_parallel_bucket_overlap", 1),
        ("zero1", 1),
        ("zero3", 1),
        ("hsdp", 1),
        ("tensor_parallel", 1),
        ("sequence_parallel", 1),
        ("pipeline_1f1b", 2),  # the rank that has the loss counts the targets of all microbatches
        ("context_ring --length 128", 1),
        ("context_all_to_all --length 128", 1),
        ("expert_parallel", 1 + LAYERS),  # the sizes of a layer's messages depend on the router
        ("local_sgd", 1),
        ("data_parallel_compressed --compress int8", 4),  # two are of its thread, and one looks for overflows
        ("diloco --sync-every 2", 3),
        ("hybrid", 2),  # two stages
    ],
)
def test_the_host_waits_for_its_gpu_only_so_often_in_a_step(run: str, most: int):
    def counted(cluster: Cluster) -> int:
        counts: list[int] = []

        def counting(*args: Any) -> Iterator[Any]:
            for batch in batches(*args):
                before = extension.host_waits()
                yield batch
                counts.append(extension.host_waits() - before)

        batches = Run.batches
        with mock.patch.object(Run, "batches", counting):
            train(cluster, *run.split(), *SHORT, "--steps", "5")
        return max(counts[1:-1])  # the first step makes what all others use, and the last one ends a round

    assert max(on_gpus(counted)) == most
