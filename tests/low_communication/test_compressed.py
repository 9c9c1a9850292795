"""Test the wrapper that compresses: error feedback, equal replicas, errors of its thread."""

import copy
import os
import signal
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from comm.collectives import CommError
from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.ranks import run_ranks
from low_communication.compressors import COMPRESSORS
from low_communication.train_compressed import CompressedDataParallel
from tests.data_parallel.equivalence import (
    Odd,
    accumulate,
    compare_with_one_process,
    examples,
    gpt,
    mean_square,
    mine,
    odd_loss,
    one_process,
    text,
    text_loss,
)
from training.report import replica_digests


def wide(seed: int) -> nn.Module:
    """Return a model that every compressor compresses; its first weight has permuted strides."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 25), nn.Linear(25, 12))
    model[0].weight = nn.Parameter(torch.randn(30, 20).t())
    return model


def test_uncompressed_buckets_on_a_thread_have_the_gradients_of_one_process():
    def wrap(module: nn.Module) -> CompressedDataParallel:
        model = CompressedDataParallel(module, "powersgd", bucket_mb=1e-3)
        model.is_compressing = False
        return model

    def compare(cluster: Cluster) -> None:
        odd = examples(cluster.world_size)
        compare_with_one_process(cluster, wrap, Odd, odd_loss, odd, (1, 2, 1))

    for world_size in (1, 2):  # test_behaviour.py has three
        run_ranks(compare, world_size)


def test_what_is_sent_and_what_remains_are_the_gradient_and_what_remained():
    def compare(cluster: Cluster) -> None:
        for name in COMPRESSORS:
            model, own = CompressedDataParallel(wide(cluster.rank), name, bucket_mb=2e-3), wide(0)
            sent_by: dict[nn.Parameter, Tensor] = defaultdict(float)  # type: ignore[arg-type]
            for bucket, compressor in model.compressors.items():

                def mean(flat: Tensor, bucket=bucket, mean=compressor.mean) -> Tensor:
                    sent = mean(flat)
                    for parameter, view in bucket.views.items():
                        at = view.storage_offset()
                        sent_by[parameter] += sent.as_strided(view.shape, view.stride(), at)
                    return sent

                compressor.mean = mean  # type: ignore[method-assign]
            total = dict.fromkeys(dict(own.named_parameters()), torch.zeros(()))
            for step in range(3):
                x = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + cluster.rank))
                for key, gradient in one_process(own, lambda m: mean_square(m, x)).items():
                    total[key] = total[key] + gradient
                model.zero_grad()
                accumulate(model, lambda m, x, _: mean_square(m, x), (x, x), microbatches=2)
                remaining = {
                    parameter: left.as_strided(view.shape, view.stride(), view.storage_offset())
                    for bucket, left in model.remaining.items()
                    for parameter, view in bucket.views.items()
                }
                found = {key: sent_by[p] + remaining[p] for key, p in model.module.named_parameters()}
                assert_same(found, total, 1e-5, f"{name}: sum of gradients after step {step},")

    run_ranks(compare, 3)


def test_replicas_stay_bitwise_equal():
    def compare(cluster: Cluster) -> None:
        for name in COMPRESSORS:
            for feedback in (True, False):
                wrapped = gpt(cluster.rank).to(torch.bfloat16 if feedback else torch.float32)
                model = CompressedDataParallel(wrapped, name, bucket_mb=1e-2, error_feedback=feedback)
                optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
                for _ in range(2):
                    optimizer.zero_grad()
                    text_loss(model, *mine(cluster, text())).backward()
                    model.finish_gradient_sync()
                    optimizer.step()
                assert len(set(replica_digests(cluster, model))) == 1, name
                assert bool(model.remaining) == feedback

    run_ranks(compare, 3)


def test_powersgd_takes_a_weight_with_permuted_strides_as_a_matrix():
    def compare(cluster: Cluster) -> None:
        layer = nn.Linear(30, 20, bias=False)
        layer.weight = nn.Parameter(torch.randn(30, 20).t())
        model = CompressedDataParallel(layer, "powersgd", rank=4)
        x = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))  # so the mean has rank 2
        mean = one_process(copy.deepcopy(layer), lambda m: mean_square(m, x))
        mean_square(model, x[cluster.rank : cluster.rank + 1]).backward()
        model.finish_gradient_sync()
        assert_same(gradients(layer), mean, 1e-5)

    run_ranks(compare, 2)


def test_an_error_of_the_thread_is_raised_by_finish_and_nothing_more_is_sent():
    def work(cluster: Cluster) -> None:
        model = CompressedDataParallel(gpt(0), bucket_mb=1e-3)
        calls = []

        def mean(flat: Tensor) -> Tensor:
            calls.append(flat)
            raise CommError("a peer has died")

        for compressor in model.compressors.values():
            compressor.mean = mean  # type: ignore[method-assign]
        text_loss(model, *text()).backward()
        with pytest.raises(CommError, match="a peer has died"):
            model.finish_gradient_sync()
        assert len(calls) == 1 < len(model.buckets)

    run_ranks(work, 1)


def test_a_rank_that_dies_is_named_by_the_ranks_that_wait_for_it_in_their_threads():
    def work(cluster: Cluster) -> None:
        model = CompressedDataParallel(gpt(0), bucket_mb=1e-3)
        if cluster.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        text_loss(model, *text()).backward()
        model.finish_gradient_sync()

    # The group's timeout comes later: the error must not depend on it.
    results = run_ranks(work, 2, timeout=20, group_timeout=40, collect_failures=True)
    assert "comm.errors.CommError: all_to_all" in str(results[0]) and "has died or left" in str(results[0])
