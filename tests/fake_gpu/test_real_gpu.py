"""Test what only a real GPU can show."""

import os

import pytest
import torch
from torch import nn

from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from tests.fake_gpu.conftest import REAL
from tests.fake_gpu.ranks import on_gpus

pytestmark = pytest.mark.skipif(REAL not in os.environ, reason="a fake GPU computes on the host")


@pytest.mark.parametrize("wrapper", [OverlapDataParallel, BucketDataParallel])
def test_the_host_runs_ahead_of_the_gpu_in_a_step_of_an_overlapping_wrapper(wrapper: type[nn.Module]):
    def train(cluster: Cluster) -> None:
        model = wrapper(GPT(GPTConfig.named("tiny")).to(cluster.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randint(256, (4, 32), device=cluster.device)
        for step in range(4):
            # In the first steps the order of the gradients is still observed, and agreed on.
            torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
            optimizer.zero_grad()
            loss_of(model(x), x).backward()
            model.finish_gradient_sync()
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")

    on_gpus(train, ranks=1)
