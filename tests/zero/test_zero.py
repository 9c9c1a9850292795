"""Test that every stage of ZeRO trains as one process does."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comm import collectives
from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.check import assert_same, parameters
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tests.data_parallel.equivalence import BATCH, Odd, examples, gpt, mine, odd_loss, text, text_loss
from tests.zero.sharded import (
    OPTIMIZERS,
    STAGES,
    Sharded,
    compare_with_one_process,
    deep_gpt,
    full_tensors,
)
from zero.run import recompute_blocks
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer


class Joint(nn.Module):
    """A block with an odd shape, a frozen layer, a layer that few examples use, and one that none uses."""

    def __init__(self, width: int, shared: nn.Linear) -> None:
        super().__init__()
        self.main, self.frozen, self.shared = nn.Linear(width, width), nn.Linear(width, width), shared
        self.sometimes, self.never = nn.Linear(width, width, bias=False), nn.Linear(3, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.main(x)) + self.frozen(x) + self.shared(x)
        takes = x[:, :1] > 1.5
        return y + self.sometimes(x) * takes if takes.any() else y


class Chain(nn.Module):
    """Blocks that share a layer, one of them frozen, one run twice, with a buffer and odd shapes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.leave, shared = nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(5, 5)
        self.blocks = nn.ModuleList(Joint(5, shared) for _ in range(4))
        self.blocks[1].requires_grad_(False)
        shared.requires_grad_(True)
        self.register_buffer("scale", torch.full((1,), 1.0 + seed))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x * self.scale)
        for block in (*self.blocks, self.blocks[2]):
            x = block(x)
        return self.leave(x)


def numbers() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, 7, generator=random).double()
    x[0] *= 10  # uses the layer that other examples do not, on the first rank only
    return x, torch.randint(3, (BATCH,), generator=random)


def test_gradients_and_parameters_equal_one_process_with_any_optimizer_and_clipping():
    def compare(cluster) -> None:
        for stage in STAGES:
            for optimizer, clip in (("sgd", None), ("momentum", 0.01), ("adamw", 0.01), ("adamw", 1e9)):
                compare_with_one_process(cluster, stage, optimizer, deep_gpt, text_loss, text(), (1, 2), clip)

    run_ranks(compare, 3, timeout=120)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_unused_tied_and_shared_parameters_are_right_on_any_number_of_ranks(stage: str):
    def compare(cluster) -> None:
        for optimizer in ("momentum", "adamw"):
            compare_with_one_process(cluster, stage, optimizer, Chain, odd_loss, numbers())
            compare_with_one_process(cluster, stage, optimizer, Odd, odd_loss, examples(cluster.world_size))
        compare_with_one_process(cluster, stage, "sgd", lambda seed: gpt(seed, tied=False), text_loss, text())

    for n in (1, 2, 3, 4):
        run_ranks(compare, n, timeout=120)


def test_results_do_not_depend_on_bucket_sizes_or_patterns():
    def compare(cluster) -> None:
        for stage in ("zero1", "zero2"):
            for bucket_mb in (1e-6, 0.002):
                for pattern in ("ring", "tree"):
                    options = {"bucket_mb": bucket_mb, "pattern": pattern}
                    compare_with_one_process(cluster, stage, "adamw", Odd, odd_loss, examples(3), **options)
        patterns = [{"pattern": pattern} for pattern in ("ring", "tree", "torch")]
        for options in ({"reshard_after_forward": False}, *patterns):
            compare_with_one_process(cluster, "zero3", "adamw", deep_gpt, text_loss, text(), **options)

    run_ranks(compare, 3)


def test_a_parameter_may_have_fewer_numbers_than_there_are_ranks():
    def few(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(1, 1, bias=False)).double()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean()

    def compare(cluster) -> None:
        batch = torch.arange(BATCH).double()[:, None] / BATCH, torch.ones(BATCH, 1).double()
        for stage in STAGES:
            compare_with_one_process(cluster, stage, "momentum", few, loss, batch)

    run_ranks(compare, 4)


def test_recomputed_blocks_have_the_same_gradients():
    def make(seed: int) -> nn.Module:
        model = Chain(seed)
        recompute_blocks(model)
        return model

    def compare(cluster) -> None:
        for options in ({}, {"reshard_after_forward": False}):
            compare_with_one_process(cluster, "zero3", "adamw", make, odd_loss, numbers(), **options)

    run_ranks(compare, 2)


def test_stage_1_in_float32_equals_plain_data_parallel_bit_by_bit():
    def compare(cluster) -> None:
        for name in OPTIMIZERS:
            optimizer_class, defaults = OPTIMIZERS[name]
            sharded, plain = deep_gpt(cluster.rank).float(), deep_gpt(0).float()
            ours = ZeroOptimizer(sharded.parameters(), optimizer_class, bucket_mb=0.01, **defaults)
            theirs = optimizer_class(plain.parameters(), **defaults)
            twin = dict(zip(sharded.parameters(), plain.parameters(), strict=True))
            for _ in range(4):
                for model, optimizer in ((sharded, ours), (plain, theirs)):
                    optimizer.zero_grad()
                    text_loss(model, *mine(cluster, text())).backward()
                # The same sums in the same order: of full buckets, on every rank.
                for bucket in ours.buckets:
                    full = torch.zeros_like(bucket.full)
                    views = bucket.flat.views(full)
                    for parameter, view in zip(bucket.flat.parameters, views, strict=True):
                        view.copy_(twin[parameter].grad)
                        twin[parameter].grad = view
                    collectives.all_reduce(full, op="mean")
                ours.step()
                theirs.step()
            assert_same(parameters(sharded), parameters(plain), rtol=0, what=f"{name}, parameter")

    for n in (2, 3):
        run_ranks(compare, n)


def test_every_stage_in_float32_equals_bucket_overlap_except_for_rounding():
    def compare(cluster) -> None:
        plain = BucketDataParallel(deep_gpt(cluster.rank).float())
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
        all_ours = [Sharded(stage, deep_gpt(cluster.rank + 1).float(), "adamw") for stage in STAGES]
        for ours in all_ours:
            for piece in ours.pieces.values():
                full = dict(plain.module.named_parameters())[
                    next(name for name, p in ours.pieces.items() if p is piece)
                ].detach()
                piece.tensor.data.copy_(full.view(-1)[piece.start : piece.start + piece.tensor.numel()])
            if isinstance(ours.optimizer, ZeroOptimizer | ZeroGradientOptimizer):
                ours.optimizer.gather_parameters()
        for _ in range(4):
            theirs.zero_grad()
            text_loss(plain, *mine(cluster, text())).backward()
            plain.finish_gradient_sync()
            theirs.step()
            for ours in all_ours:
                ours.optimizer.zero_grad()
                ours.accumulate(text_loss, mine(cluster, text()), 1)
                ours.optimizer.step()
        for ours in all_ours:
            assert_same(
                full_tensors(ours.pieces, lambda piece: piece.tensor),
                parameters(plain.module),
                1e-4,
                "parameter",
            )

    run_ranks(compare, 2)


def test_bf16_halves_the_bytes_and_keeps_shards_in_full_precision():
    def compare(cluster) -> None:
        reference = deep_gpt(0).float()
        ours = Sharded("zero3", deep_gpt(cluster.rank).float(), "sgd", compute_dtype=torch.bfloat16)
        before = LEDGER.total().bytes_sent
        ours.accumulate(text_loss, mine(cluster, text()), 2)
        assert all(
            piece.tensor.dtype == piece.tensor.grad.dtype == torch.float32 for piece in ours.pieces.values()
        )
        sent = LEDGER.total().bytes_sent - before
        with ours.model.gathered() as full:
            assert full.head.weight.dtype == torch.bfloat16
        assert sent < 2.2 * 3 * sum(p.nbytes for p in reference.parameters()) / 2 * (1 / 2)
        text_loss(reference, *text()).backward()
        expected = {
            name: p.grad for name, p in reference.named_parameters() if not name.endswith("k_proj.bias")
        }
        actual = {
            k: v for k, v in full_tensors(ours.pieces, lambda p: p.tensor.grad).items() if k in expected
        }
        assert_same(actual, expected, rtol=0.1, what="gradient")

    run_ranks(compare, 2)


def test_two_ranks_agree_after_no_sync_with_each_kind_of_zero_grad():
    def compare(cluster) -> None:
        for stage in STAGES:
            ours = Sharded(stage, Odd(0), "sgd")
            for set_to_none in (True, False, True):
                ours.optimizer.zero_grad(set_to_none=set_to_none)
                ours.accumulate(odd_loss, mine(cluster, examples(2)), 2)
                reference = Odd(0)
                odd_loss(reference, *examples(2)).backward()
                expected = {n: p.grad for n, p in reference.named_parameters() if n in ours.pieces}
                assert_same(full_tensors(ours.pieces, lambda piece: piece.tensor.grad), expected, what=stage)

    run_ranks(compare, 2)


def test_gradients_are_right_for_a_loss_that_is_a_sum():
    """Gradients are the mean over ranks for any loss. A sum is the mean times the batch size."""

    def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="sum") * (BATCH / len(x))

    def compare(cluster) -> None:
        for stage in STAGES:
            compare_with_one_process(cluster, stage, "sgd", Odd, summed, examples(2), microbatches=(1,))

    run_ranks(compare, 2)
