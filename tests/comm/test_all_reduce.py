"""An all-reduce of random floats, NaNs and zeros of both signs is right, and bitwise equal on all ranks."""

import hashlib
import itertools

import torch

from comm import collectives
from lab.ranks import run_ranks
from tests.comm.collective_cases import ALL, ALL_REDUCE, REDUCING, REDUCTIONS


def test_a_mean_of_float16_that_fits_does_not_overflow_though_the_sum_would():
    def mean(cluster) -> None:
        large = torch.full((5,), 40000.0, dtype=torch.float16)
        for op, pattern in ALL:
            if op not in REDUCING:
                continue
            mine = large[: 4 + (pattern != "torch")]
            given, shard = mine.clone(), torch.tensor_split(mine, cluster.world_size)[cluster.rank].clone()
            if op == "reduce_scatter":
                collectives.reduce_scatter(shard, given, "mean", pattern=pattern)
            else:
                getattr(collectives, op)(given, "mean", pattern=pattern)
            for got in (given, shard):
                assert torch.equal(got, mine[: len(got)]), f"{op}, {pattern}: {got}"

    run_ranks(mean, 2)


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def test_an_all_reduce_is_bitwise_the_same_on_every_rank():
    n = 3

    def reduce_all(cluster) -> list[str]:
        results = []
        for pattern, dtype, op in itertools.product(
            ALL_REDUCE, (torch.float32, torch.bfloat16), ("sum", "mean", "product")
        ):
            inputs = [
                torch.randn(1003, generator=torch.Generator().manual_seed(p)).to(dtype) for p in range(n)
            ]
            mine = inputs[cluster.rank].clone()
            collectives.all_reduce(mine, op, pattern=pattern)
            if op != "product":
                expected = torch.stack(inputs).double().sum(0) / (n if op == "mean" else 1)
                tolerance = n * torch.finfo(dtype).eps * 10
                assert torch.allclose(mine.double(), expected, rtol=0, atol=tolerance), (pattern, dtype, op)
            results.append(f"{pattern} {dtype} {op} {bits(mine)}")
        signs = [0.0, -0.0, torch.nan, 1.0, -0.0]
        for pattern, op in itertools.product(ALL_REDUCE, REDUCTIONS):
            mine = torch.tensor([signs[(cluster.rank + i) % len(signs)] for i in range(20)])
            collectives.all_reduce(mine, op, pattern=pattern)
            assert pattern == "torch" or mine.isnan().any(), (pattern, op)
            mine[mine.isnan()] = 2.0
            results.append(f"{pattern} {op} with zeros of both signs and NaNs {bits(mine)}")
        return results

    first, *others = run_ranks(reduce_all, n)
    assert others == [first] * (n - 1)
