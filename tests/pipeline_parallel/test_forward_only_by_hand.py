"""The hand-written lessons evaluate, too: plain layers, plain messages, and the outputs of one process."""

import pytest
import torch
from torch import nn

from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Traffic
from pipeline_parallel.train_afab import AllForwardAllBackward
from pipeline_parallel.train_model_parallel import ModelParallel


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("lesson", [ModelParallel, AllForwardAllBackward])
def test_forward_only_returns_the_outputs_of_one_process(lesson, n: int):
    torch.manual_seed(0)
    stages = [nn.Linear(4 + i, 5 + i).double() for i in range(n)]
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = nn.Sequential(*stages)(x).detach()

    def work(cluster: Cluster) -> None:
        rank = cluster.rank
        boundaries = [None, *(torch.empty(2, 5 + i).double() for i in range(n - 1)), None]
        order: list[str] = []

        class Noted:
            def __init__(self, name: str) -> None:
                order.append(name)

            def __enter__(self) -> None: ...

            def __exit__(self, *error: object) -> None: ...

        by_hand = lesson(
            stage=stages[rank],
            loss_of=nn.functional.cross_entropy,
            microbatches=3,
            rank=rank,
            ranks=n,
            input_like=boundaries[rank],
            output_like=boundaries[rank + 1],
            action=Noted,
        )
        before = LEDGER.total()
        outputs = by_hand.forward_only(x if rank == 0 else None)
        sent = LEDGER.total() - before

        # The last rank has the outputs, without a graph. Every other rank has sent three activations.
        if rank == n - 1:
            torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=0)
            assert not outputs.requires_grad and sent == Traffic()
        else:
            assert outputs is None and sent == Traffic(3 * 2 * (5 + rank) * 8, 3)
        assert order == ["F0", "F1", "F2"]
        assert all(parameter.grad is None for parameter in stages[rank].parameters())

    run_ranks(work, n, timeout=20)
