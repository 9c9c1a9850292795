"""Grade a wrapper that compresses by what it does: what arrives, what is sent later, and how much."""

from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from low_communication.train_compressed import CompressedDataParallel
from tests.data_parallel.equivalence import accumulate
from tests.data_parallel.test_behaviour import of_odd_models, of_pairs
from tests.low_communication.equivalence import payload


def compressed(
    module: nn.Module, group: Group = None, compress: str = "float32", **options: Any
) -> nn.Module:
    return CompressedDataParallel(module, compress, group, **options)


def the_largest(numbers: Tensor) -> Tensor:
    """Return the third of the numbers that is largest in size, and zeros for the others."""
    return numbers * (numbers.abs() >= numbers.abs().sort(descending=True).values[len(numbers) // 3 - 1])


def compare(cluster: Cluster, microbatches: int) -> None:
    """Compare topk with its definition. There is one weight, so all gradients together are one tensor."""
    n, size = cluster.world_size, 12
    model = compressed(nn.Linear(size, 1, bias=False), None, "topk", share=1 / 3)
    remaining = [torch.zeros(size)] * n
    for step in range(4):
        x = torch.randn(n, microbatches, size, generator=torch.Generator().manual_seed(step))
        before = [x[rank].mean(0) + remaining[rank] for rank in range(n)]  # the gradient of x @ weight is x
        sent = [the_largest(each) for each in before]
        remaining = [all_of_it - part for all_of_it, part in zip(before, sent, strict=True)]
        model.zero_grad()
        own = x[cluster.rank]
        accumulate(model, lambda model, x, _: model(x).sum(), (own, own), microbatches)
        expected = {"weight": sum(sent)[None] / n}
        assert_same({"weight": model.module.weight.grad}, expected, 1e-5, f"gradient in step {step}")


def test_what_a_step_has_not_sent_is_sent_later():
    run_ranks(compare, 2, 1)


def test_microbatches_add_up_before_they_are_compressed():
    run_ranks(compare, 3, 2)


def test_a_step_sends_few_bytes_and_earlier_microbatches_none():
    def work(cluster: Cluster) -> None:
        model, x = compressed(nn.Linear(256, 64, bias=False), None, "int8"), torch.ones(1, 256)
        start = payload()
        model.require_backward_grad_sync = False
        model(x).sum().backward()
        early = payload() - start
        assert early == 0, f"a backward before the last one sent {early} bytes, and not 0"
        model.require_backward_grad_sync = True
        model(x).sum().backward()
        model.finish_gradient_sync()
        share = (payload() - start) / (256 * 64 * 4)  # of what a ring sends on 2 ranks
        assert share < 0.26, f"a step with int8 sent {share:.2f} times the bytes of float32, and not 0.25"

    run_ranks(work, 2)


def test_without_compression_odd_models_have_the_gradients_of_one_process():
    run_ranks(of_odd_models, 3, compressed)


def test_compressed_gradients_are_averaged_over_the_ranks_of_their_group_only():
    run_ranks(of_pairs, 4, compressed)
