"""Test that PyTorch's own tools work on a model of ZeRO stage 3: attributes, clipping, GradScaler, dtypes."""

import copy

import torch
from torch import Tensor, nn

from lab.check import assert_same
from lab.models.text import rank_slice
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import mean_square
from tests.zero.sharded import full_tensors
from tests.zero.zero3_models import linear, mlp, numbers
from zero.train_zero3 import FullyShardedDataParallel


def test_a_freed_parameter_still_has_its_shape_dtype_and_device():
    def work(cluster) -> None:
        plain, model = linear(), FullyShardedDataParallel(linear())
        weight = model.module.weight
        assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
        for about in ("shape", "dtype", "device", "ndim", "nbytes"):
            assert getattr(weight, about) == getattr(plain.weight, about)
        assert (weight.numel(), weight.size(0), weight.dim(), len(weight)) == (36, 6, 2, 6)
        assert weight.new_zeros(3).tolist() == [0.0] * 3
        assert repr(weight) == "Freed(shape=(6, 6), dtype=torch.float64)"
        assert model.to("cpu").double() is model

    run_ranks(work, 2)


def test_a_view_of_a_weight_that_a_forward_keeps_stays_readable():
    class Keeps(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self[0].weight.detach()[0]
            return super().forward(x)

    def work(cluster) -> None:
        torch.manual_seed(0)
        module = Keeps(linear(), linear())
        expected = module[0].weight.detach()[0].clone()
        model = FullyShardedDataParallel(module)
        mean_square(model, numbers()).backward()
        model.finish_gradient_sync()
        assert torch.equal(module.kept, expected)

    run_ranks(work, 2)


def test_torchs_own_clipping_uses_the_norm_over_all_ranks():
    def work(cluster) -> None:
        for norm_type in (2.0, 1.0, 3.0, float("inf")):
            torch.manual_seed(0)
            reference = mlp()
            model = FullyShardedDataParallel(copy.deepcopy(reference))
            mean_square(reference, numbers()).backward()
            mean_square(model, rank_slice(numbers(), cluster.rank, cluster.world_size)).backward()
            model.finish_gradient_sync()
            norms = {
                name: nn.utils.clip_grad_norm_(m.parameters(), 1e-3, norm_type)
                for name, m in (("ours", model), ("theirs", reference))
            }
            assert_same({"norm": norms["ours"]}, {"norm": norms["theirs"]}, what=str(norm_type))
            expected = {name: p.grad for name, p in reference.named_parameters()}
            assert_same(
                full_tensors(model.pieces, lambda piece: piece.tensor.grad), expected, what=str(norm_type)
            )

    run_ranks(work, 3)


def test_a_grad_scaler_skips_a_step_on_all_ranks_or_on_none():
    """The infinity is in one parameter's gradient, and so in one rank's shard only."""

    def work(cluster) -> list[tuple[float, bool]]:
        model = FullyShardedDataParallel(nn.Linear(4, 1))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 4.0)
        seen = []
        for largest in (float("inf"), 1.0):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            scaler.scale(model(torch.tensor([[largest, 1.0, 1.0, 1.0]])).sum()).backward()
            model.finish_gradient_sync()
            scaler.step(optimizer)
            scaler.update()
            stepped = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            seen.append((scaler.get_scale(), any(stepped)))
        return seen

    assert run_ranks(work, 2) == [[(2.0, False), (2.0, True)]] * 2


class Mixed(nn.Module):
    """A model with integer, complex and floating-point parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([257, 1003]), requires_grad=False)
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.table.tolist() == [257, 1003] and self.phase.dtype == torch.complex64
        y = self.layer(x)
        assert y.dtype == torch.bfloat16
        return y, (self.phase * self.phase.conj() * 2).abs().square().sum(), self.table + 1


def test_compute_dtype_does_not_change_integers_complex_numbers_or_the_outputs_dtype():
    def work(cluster) -> None:
        torch.manual_seed(0)
        plain = Mixed()
        model = FullyShardedDataParallel(copy.deepcopy(plain), compute_dtype=torch.bfloat16)
        y, energy, table = model(torch.ones(3, 2))
        assert (y.dtype, table.dtype) == (torch.float32, torch.int64)
        energy.backward()
        model.finish_gradient_sync()
        norms = model.clip_grad_norm_(1e9), nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        expected = 2 * (plain.phase * plain.phase.conj() * 2).abs().square().sum()
        (gradient,) = torch.autograd.grad(expected / 2, plain.phase)
        for norm in norms:
            assert_same({"norm": norm}, {"norm": gradient.abs().square().sum().sqrt()}, rtol=1e-5)

    run_ranks(work, 2)


def test_a_float16_mean_does_not_overflow_even_if_the_sum_would():
    def work(cluster) -> None:
        model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), compute_dtype=torch.float16)
        (model(torch.ones(1, 1)) * 40000.0).sum().backward()
        model.finish_gradient_sync()
        assert full_tensors(model.pieces, lambda piece: piece.tensor.grad)["weight"].item() == 40000.0

    run_ranks(work, 3)


def test_a_full_state_dict_has_the_persistent_buffers():
    def work(cluster) -> None:
        module = nn.BatchNorm1d(2)
        module.register_buffer("scratch", torch.ones(1), persistent=False)
        state = FullyShardedDataParallel(module).full_state_dict()
        if cluster.is_main:
            nn.BatchNorm1d(2).load_state_dict(state)

    run_ranks(work, 2)
