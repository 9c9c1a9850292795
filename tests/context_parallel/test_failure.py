"""A rank that dies in the middle of the attention is named by the others, and no rank hangs."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from context_parallel.block_attention import KERNELS, Kernel
from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import SequenceCut
from context_parallel.train_ring_attention import ring_attention
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from tests.context_parallel.equivalence import qkv


def fatal(dies_in: str) -> Kernel:
    """Return a kernel that kills the rank at its second call, in the forward or in the backward."""
    calls = 0

    def counted(function: Callable[..., Any], where: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += dies_in == where
            if calls == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    kernel = KERNELS["fused"]
    return Kernel(counted(kernel.attend, "forward"), counted(kernel.backward, "backward"))


@pytest.mark.parametrize("dies_in", ["forward", "backward"])
def test_a_rank_that_dies_in_the_middle_of_the_ring_is_named_by_the_others(dies_in: str):
    def work(cluster: Cluster) -> None:
        kernel = fatal(dies_in) if cluster.rank == 1 else KERNELS["fused"]
        sequence = SharedSequence(None, SequenceCut.zigzag(12, 3), kernel, False)
        q, k, v, dy = (sequence.cut.own(x, cluster.rank, 2).requires_grad_() for x in qkv(12))
        for _ in range(3):  # a rank whose neighbours are alive may end the step in which another one dies
            ring_attention(q, k, v, sequence).backward(dy)

    first, dead, last = run_ranks(work, 3, timeout=20, group_timeout=10, collect_failures=True)
    assert str(dead) == "rank 1 was killed by SIGKILL before it returned."
    sentences = [str(error) for error in (first, last) if isinstance(error, RankError)]
    assert len(sentences) == 2
    assert all("has died or left, so look for the first error in its log" in each for each in sentences)
    assert any("rank 1 has died or left" in each for each in sentences)
