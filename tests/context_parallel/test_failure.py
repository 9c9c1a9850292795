"""A rank that dies in the middle of the attention is named by the others, and no rank hangs."""

import os
import signal
from typing import Any

import pytest
from torch import Tensor

from context_parallel.block_attention import Fused
from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import Part, SequenceCut
from context_parallel.train_ring_attention import ring_attention
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from tests.context_parallel.equivalence import qkv


class Fatal(Fused):
    """Kill the rank at its second call, in the forward or in the backward."""

    def __init__(self, dies_in: str) -> None:
        self.dies_in, self.calls = dies_in, 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        self._live_or_die("forward")
        return super().attend(q, k, v, part)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        self._live_or_die("backward")
        return super().backward(*arguments)

    def _live_or_die(self, where: str) -> None:
        self.calls += self.dies_in == where
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("dies_in", ["forward", "backward"])
def test_a_rank_that_dies_in_the_middle_of_the_ring_is_named_by_the_others(dies_in: str):
    def work(cluster: Cluster) -> None:
        kernel = Fatal(dies_in) if cluster.rank == 1 else Fused()
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
