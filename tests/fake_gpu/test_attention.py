"""Ring attention on GPUs takes PyTorch's kernel for GPUs, of which the fake has a stand-in."""

import os
from contextlib import nullcontext

import pytest
import torch

from lab.cluster import Cluster
from tests.context_parallel.equivalence import RING, compare_attention, documents_with_borders
from tests.context_parallel.gpu_kernel import gpu_kernel
from tests.fake_gpu.conftest import REAL
from tests.fake_gpu.ranks import on_gpus


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_ring_attention_with_the_kernel_of_a_gpu_equals_one_process(dtype: torch.dtype, rtol: float):
    def compare(cluster: Cluster) -> None:
        with nullcontext() if REAL in os.environ else gpu_kernel("CUDA"):
            for documents in (None, documents_with_borders(70, (3, 40, 42), (57,))):
                compare_attention(cluster, RING, 70, documents, 4, 2, 8, dtype, rtol)

    on_gpus(compare, FAKE_SLOW="0.002")
