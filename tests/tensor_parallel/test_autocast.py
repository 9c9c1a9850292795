"""Test that under torch.autocast tensor parallel is as close to float32 as one process is."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.models.model import MLP, loss_of
from lab.ranks import run_ranks
from tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tensor_parallel.parallelize import parallelize
from tests.tensor_parallel.equivalence import full_tensors, gpt, text

Gradients = dict[str, Tensor | None]


def assert_as_close(ours: Gradients, theirs: Gradients, exact: Gradients, what: str) -> None:
    """Assert that bfloat16 changes our gradients at most twice as much as one process's, or very little."""
    least = 2**-10 * max(float(gradient.norm()) for gradient in exact.values())
    for name, right in exact.items():
        assert ours[name].dtype == torch.float32, f"{what}: {name} is {ours[name].dtype}"
        error, known = (float((one[name] - right).norm()) for one in (ours, theirs))
        assert error <= max(2 * known, least), f"{what}: {name} is off by {error}, and plain by {known}"


def test_a_gpts_gradients_are_as_exact_as_those_of_one_process_under_autocast():
    def compare(cluster: Cluster, sequence_parallel: bool) -> None:
        for options in ({}, {"tied": False, "num_kv_heads": 6}):
            x, y = text()
            exact, plain = gpt(**options).float(), gpt(**options).float()
            ours = parallelize(gpt(cluster.rank, **options).float(), None, sequence_parallel)
            loss_of(exact(x), y).backward()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected, loss = loss_of(plain(x), y), ours.loss(ours(x), y)
            for one in (expected, loss):
                one.backward()
            ours.finish_gradient_sync()
            assert_same({"loss": loss.detach()}, {"loss": expected.detach()}, 1e-3)
            found = full_tensors(ours, gradients(ours.module))
            what = f"{options}, sequence_parallel {sequence_parallel}"
            assert_as_close(found, gradients(plain), gradients(exact), what)

    for sequence_parallel in (False, True):
        run_ranks(compare, 3, sequence_parallel)


def test_an_mlps_gradients_are_as_exact_even_if_the_backward_runs_under_autocast():
    def compare(cluster: Cluster) -> None:
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
        y = torch.arange(5)
        exact, plain, ours = MLP([7, 12, 5]), MLP([7, 12, 5]), parallelize(MLP([7, 12, 5]))
        F.cross_entropy(exact(x), y).backward()
        for model in (plain, ours):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                F.cross_entropy(model(x), y).backward()
        found = full_tensors(ours, gradients(ours.module))
        assert_as_close(found, gradients(plain), gradients(exact), "MLP")

    run_ranks(compare, 2)


def test_on_one_rank_gradients_under_autocast_equal_plain_ones_bit_by_bit():
    def compare(cluster: Cluster) -> None:
        for by_tokens in (False, True):
            for make in (ColumnParallelLinear, RowParallelLinear):
                layer = make(6, 12, sequence_parallel=by_tokens)
                plain = nn.Linear(6, 12)
                plain.load_state_dict(layer.state_dict())
                found = []
                for module in (layer, plain):
                    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        y = module(x)
                    assert y.dtype == torch.bfloat16
                    (y.float() * torch.linspace(0, 1, 12)).sum().backward()
                    found.append(gradients(module) | {"input": x.grad})
                assert_same(found[0], found[1], 0, f"gradient, {make.__name__},")

    run_ranks(compare, 1)
