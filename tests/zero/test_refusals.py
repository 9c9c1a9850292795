"""Test that ZeRO refuses, in a sentence, what would train wrongly without an error."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.zero.sharded import STAGES, Blocks, Sharded
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero3 import FullyShardedDataParallel


def refused(work: Callable[[], object], sentence: str) -> None:
    def on_a_rank(cluster: Cluster) -> None:
        with pytest.raises(WorkbookError, match=sentence):
            work()

    run_ranks(on_a_rank, 2, timeout=20)


def backward(ours: Sharded) -> None:
    ours.model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("stage", STAGES)
def test_a_forgotten_finish_gradient_sync_is_refused(stage: str):
    def work() -> None:
        ours = Sharded(stage, Blocks(), "sgd")
        backward(ours)
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        backward(ours)

    refused(work, "finish_gradient_sync")


def test_a_backward_after_the_gradients_are_averaged_is_refused():
    for stage in ("zero1", "zero2"):

        def work(stage: str = stage) -> None:
            ours = Sharded(stage, Blocks(), "sgd")
            backward(ours)
            ours.optimizer.finish_gradient_sync()
            ours.optimizer.finish_gradient_sync()  # which changes nothing
            ours.optimizer.step()
            backward(ours)

        refused(work, "call zero_grad")


def test_a_second_backward_before_the_first_is_finished_is_refused():
    def work() -> None:
        ours = Sharded("zero1", Blocks(), "sgd")
        backward(ours)
        backward(ours)

    refused(work, "Another backward")


def test_a_backward_without_a_forward_after_the_last_sync_is_refused_in_stage_3():
    def work() -> None:
        model = FullyShardedDataParallel(Blocks())
        loss = model(torch.ones(2, 8)).sum()
        loss.backward(retain_graph=True)
        model.finish_gradient_sync()
        loss.backward()

    refused(work, "without a forward before it")


def test_a_backward_after_the_optimizers_step_is_refused():
    def work() -> None:
        ours = Sharded("zero3", Blocks(), "sgd")
        backward(ours)
        ours.model.finish_gradient_sync()
        loss = ours.model(torch.ones(2, 8)).sum()
        ours.optimizer.step()
        loss.backward()

    refused(work, "stepped between a forward and its backward")


def test_optimizers_that_look_at_full_tensors_later_groups_and_state_dicts_are_refused():
    def adafactor() -> None:
        ZeroOptimizer(Blocks().parameters(), torch.optim.Adafactor)

    refused(adafactor, "element by element")
    refused(lambda: Sharded("zero1", Blocks(), "sgd").optimizer.state_dict(), "its own shards only")
    refused(lambda: FullyShardedDataParallel(Blocks()).state_dict(), "full_state_dict")
    more = {"params": [nn.Parameter(torch.ones(2))]}
    refused(lambda: Sharded("zero2", Blocks(), "sgd").optimizer.add_param_group(more), "all of them at once")


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_that_was_changed_after_wrapping_is_refused(stage: str):
    def work() -> None:
        ours = Sharded(stage, Blocks(), "sgd")
        ours.module.blocks[1].requires_grad_(False)
        backward(ours)
        ours.syncing.finish_gradient_sync()

    refused(work, "after wrapping")


def test_sparse_gradients_are_refused():
    refused(lambda: FullyShardedDataParallel(nn.Embedding(3, 2, sparse=True)), "sparse")


def test_who_reads_a_freed_parameter_sees_nan_in_its_shape():
    def work(cluster: Cluster) -> None:
        model = FullyShardedDataParallel(Blocks())
        weight = model.module.blocks[0].weight
        assert weight.shape == (8, 8) and weight.isnan().all()

    run_ranks(work, 2)


def test_after_an_error_another_step_can_begin():
    def work(cluster: Cluster) -> None:
        results = []
        for breaks in (False, True):
            torch.manual_seed(0)
            ours = Sharded("zero1", Blocks(), "sgd")
            if breaks:
                backward(ours)
                with pytest.raises(WorkbookError):
                    backward(ours)
                ours.optimizer.finish_gradient_sync()
                ours.optimizer.zero_grad()
            backward(ours)
            ours.optimizer.finish_gradient_sync()
            results.append(ours.gradients())
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])

    run_ranks(work, 2)
