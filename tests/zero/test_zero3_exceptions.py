"""Test ZeRO stage 3 after an exception in a step, and after the death of a rank."""

import copy
import os
import signal

import pytest
import torch
from torch import Tensor, nn

from comm.errors import CommError
from lab.check import assert_same
from lab.models.text import rank_slice
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import mean_square
from tests.zero.sharded import full_tensors
from tests.zero.zero3_models import linear, numbers
from zero.train_zero3 import FullyShardedDataParallel


class Breaks(nn.Module):
    """A block whose forward or backward raises when `when` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.when = linear(), ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ValueError("on purpose")
        y = self.inner(x)
        if self.when == "backward":
            y.register_hook(self.refuse)
        return y.sin()

    def refuse(self, gradient: Tensor) -> None:
        raise ValueError("on purpose")


def test_after_an_exception_in_any_pass_the_next_step_is_right():
    def work(cluster) -> None:
        for broken, finishes in ((0, True), (1, False), (2, True), (2, False)):
            for when in ("forward", "backward"):
                torch.manual_seed(0)
                module = nn.Sequential(*(Breaks() for _ in range(3)))
                reference = copy.deepcopy(module)
                model = FullyShardedDataParallel(module)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                mine = rank_slice(numbers(), cluster.rank, cluster.world_size)
                mean_square(model, 5 * mine).backward()  # a microbatch before it
                module[broken].when = when
                with pytest.raises(ValueError, match="on purpose"):
                    mean_square(model, mine).backward()
                module[broken].when = ""
                if finishes:
                    model.finish_gradient_sync()
                optimizer.zero_grad()
                mean_square(model, mine).backward()
                model.finish_gradient_sync()
                mean_square(reference, numbers()).backward()
                expected = {name: p.grad for name, p in reference.named_parameters()}
                assert_same(full_tensors(model.pieces, lambda piece: piece.tensor.grad), expected, what=when)

    run_ranks(work, 2)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_dies_in_a_step_is_named_in_one_sentence(when: str):
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(cluster) -> str:
        module = nn.Sequential(*(Breaks() for _ in range(3)))
        model = FullyShardedDataParallel(module)
        mean_square(model, numbers()).backward()  # the next step prefetches blocks
        model.finish_gradient_sync()
        if cluster.rank == 1 and when == "forward":
            module[1].register_forward_pre_hook(die)
        elif cluster.rank == 1:
            module[1].register_full_backward_hook(die)
        with pytest.raises(CommError) as error:
            mean_square(model, numbers()).backward()
            model.finish_gradient_sync()
        return str(error.value)

    survivor, _ = run_ranks(work, 2, group_timeout=40, collect_failures=True)
    assert isinstance(survivor, str), survivor
    assert "rank 1 has died" in survivor and "\n" not in survivor
