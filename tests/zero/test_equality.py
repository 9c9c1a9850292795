"""Test that every stage of ZeRO trains as one process does.

The short tests are also run against the wrong implementations in exercises/mutants.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comm.cost import Link
from comm.wire import slow_link
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import (
    BATCH,
    EitherWay,
    Odd,
    examples,
    gpt,
    mean_square,
    mine,
    odd_loss,
    text,
    text_loss,
)
from tests.zero.sharded import (
    SMALL_BUCKETS,
    STAGES,
    Blocks,
    Sharded,
    compare_with_one_process,
    deep_gpt,
)
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel, recompute_blocks


class Layer(nn.Module):
    """A block with an odd shape, and perhaps a layer that all blocks share and a frozen one."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared, self.frozen = nn.Linear(5, 5), shared, nn.Linear(5, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x)) + self.shared(x) + self.frozen(x)


class Layers(nn.Module):
    """A layer before the blocks (stage 3's root), and blocks, of which the first one runs twice."""

    def __init__(self, seed: int, shares: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        shared = nn.Linear(5, 5) if shares else nn.Identity()
        self.enter, self.blocks = nn.Linear(7, 5), nn.ModuleList(Layer(shared) for _ in range(3))
        self.register_buffer("scale", torch.full((1,), 1.0 + seed))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x * self.scale)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.blocks[-1](x) + self.blocks[0](x)


def compare(*stages: str, make: Any = Layers, optimizer: str = "sgd", n: int = 2, **options: Any) -> None:
    """Compare gradients and parameters with one process in float64; each rank has other initial weights."""

    def work(cluster: Cluster) -> None:
        for stage in stages:
            batch = examples(cluster.world_size)
            compare_with_one_process(
                cluster, stage, optimizer, make, odd_loss, batch, **({"microbatches": (1, 1)} | options)
            )

    run_ranks(work, n, timeout=20)


def test_gradients_are_means_and_after_a_step_all_ranks_compute_with_the_new_parameters():
    compare("zero1_textbook", *STAGES, n=3)


def test_gradients_are_clipped_by_the_norm_over_all_shards():
    compare("zero1_textbook", "zero1", "zero3", clip=0.01)


def test_the_gradients_of_all_microbatches_add_up_in_the_shards():
    compare("zero1_textbook", *STAGES, microbatches=(3, 2))


def test_a_layer_shared_by_blocks_is_gathered_in_each_of_them():
    compare("zero3", make=lambda seed: Layers(seed, shares=True))


def test_an_unused_parameter_gets_zeros_also_where_only_some_ranks_use_it():
    compare("zero1_textbook", *STAGES, make=Odd, optimizer="adamw", microbatches=(1, 3))


def test_the_backward_of_one_rank_may_run_in_another_order():
    """All layers have one shape, so a message of one would fit where that of another is expected."""

    def work(cluster: Cluster) -> None:
        x = torch.arange(12.0).double().view(4, 3) / 12
        for stage in ("zero1", "zero2"):
            ours = Sharded(stage, EitherWay(0, backwards=cluster.rank == 1), "sgd", **SMALL_BUCKETS)
            ours.accumulate(lambda model, x, _: mean_square(model, x), mine(cluster, (x, x)), 1)
            reference = EitherWay(0, backwards=False)
            mean_square(reference, x).backward()
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(
                    ours.gradients()[name], parameter.grad, rtol=1e-9, atol=0, msg=name
                )

    run_ranks(work, 2, timeout=20)


@pytest.mark.parametrize("n", [1, 3, 4])  # the short tests have two
def test_tied_frozen_unused_and_shared_parameters_are_right_on_any_number_of_ranks(n: int):
    def work(cluster: Cluster) -> None:
        odd = examples(cluster.world_size)
        for stage in STAGES:
            compare_with_one_process(cluster, stage, "adamw", Odd, odd_loss, odd)
            if n == 3:
                compare_with_one_process(cluster, stage, "momentum", lambda s: Layers(s, True), odd_loss, odd)
                compare_with_one_process(cluster, stage, "adamw", gpt, text_loss, text(), clip=0.01)

    run_ranks(work, n, timeout=120)


def test_bucket_sizes_patterns_options_and_a_slow_link_do_not_change_the_result():
    def recomputed(seed: int) -> nn.Module:
        model = deep_gpt(seed)
        recompute_blocks(model)
        return model

    def work(cluster: Cluster) -> None:
        odd = examples(cluster.world_size)
        for stage in ("zero1", "zero2"):
            options = {"bucket_mb": 4e-4, "pattern": "tree"}
            compare_with_one_process(cluster, stage, "adamw", Odd, odd_loss, odd, (2, 1), **options)
        ways: list[tuple[Any, dict[str, Any]]] = [
            (deep_gpt, {"reshard_after_forward": False, "pattern": "ring"}),
            (recomputed, {}),
        ]
        for make, way in ways:
            compare_with_one_process(cluster, "zero3", "adamw", make, text_loss, text(), (1, 2), **way)
        with slow_link.slowed(Link(0.002, 0.0)):
            for stage in STAGES:
                compare_with_one_process(cluster, stage, "sgd", Layers, odd_loss, odd, (2, 1))

    run_ranks(work, 3, timeout=60)


def test_a_parameter_may_have_fewer_numbers_than_there_are_ranks():
    def few(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(1, 1, bias=False)).double()

    def work(cluster: Cluster) -> None:
        batch = torch.arange(BATCH).double()[:, None] / BATCH, torch.ones(BATCH, 1).double()
        for stage in STAGES:
            compare_with_one_process(
                cluster, stage, "momentum", few, lambda m, x, y: (m(x) - y).square().mean(), batch
            )

    run_ranks(work, 4)


def test_stage_3_takes_lists_in_lists_no_blocks_and_blocks_that_pass_their_input_on():
    class PassesOn(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x

    class Nested(nn.Module):
        """A list of lists: the inner ones have no forward."""

        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            pairs = (nn.ModuleList([PassesOn(7, 7), PassesOn(7, 7)]) for _ in range(2))
            self.layers = nn.ModuleList(pairs).double()

        def forward(self, x: Tensor) -> Tensor:
            for first, second in self.layers:
                x, _ = second(torch.tanh(first(x)[0]))
            return x

    def a_layer(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(7, 3).double()

    def work(cluster: Cluster) -> None:
        for make in (Nested, a_layer):
            compare_with_one_process(cluster, "zero3", "sgd", make, odd_loss, examples(2))

    run_ranks(work, 2, timeout=60)


def test_an_evaluation_between_steps_changes_nothing_and_sees_the_new_parameters():
    def work(cluster: Cluster) -> None:
        def losses(is_watched: bool) -> list[float]:
            ours, seen = Sharded("zero3", deep_gpt(0), "adamw"), []
            for _ in range(2):
                ours.optimizer.zero_grad()
                ours.accumulate(text_loss, mine(cluster, text()), 1)
                ours.optimizer.step()
                evaluated = ours.model if is_watched else deep_gpt(5)
                if not is_watched:
                    evaluated.load_state_dict(ours.model.full_state_dict())
                with torch.no_grad():
                    seen.append(text_loss(evaluated, *mine(cluster, text())).item())
                assert all(unit.is_freed for unit in ours.model.units)
                text_loss(evaluated, *mine(cluster, text()))  # a forward that no backward follows
            return seen

        assert losses(is_watched=True) == pytest.approx(losses(is_watched=False), abs=1e-12)

    run_ranks(work, 2)


def test_a_full_state_goes_into_another_stage_3_model():
    def work(cluster: Cluster) -> None:
        state = Layers(3).state_dict()
        model = FullyShardedDataParallel(Layers(cluster.rank))
        model.load_full_state_dict(state)
        assert_same(model.full_state_dict(), state, 0)
        with model.gathered() as full:
            assert_same(full.state_dict(), state, 0)

    run_ranks(work, 3)


def test_bf16_computes_in_16_bits_and_keeps_shards_in_full_precision():
    def work(cluster: Cluster) -> None:
        reference = deep_gpt(0).float()
        ours = Sharded("zero3", deep_gpt(cluster.rank).float(), "sgd", compute_dtype=torch.bfloat16)
        ours.accumulate(text_loss, mine(cluster, text()), 2)
        tensors = [tensor for s in ours.shards.values() for tensor in (s.tensor, s.tensor.grad)]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
        assert {unit.full.dtype for unit in ours.model.units} == {torch.bfloat16}
        text_loss(reference, *text()).backward()
        for name, gradient in ours.gradients().items():
            if not name.endswith("k_proj.bias"):  # rounding is all that is left of its gradient
                expected = reference.get_parameter(name).grad
                assert (gradient - expected).norm() / expected.norm() < 0.05, name

    run_ranks(work, 2)


def test_parameters_may_be_in_groups_with_their_own_options():
    options = {"lr": 0.01, "eps": 1e-3}

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.5},
        ]

    def trained(model: nn.Module, optimizer: Any, syncing: Any, batch: Any) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            optimizer.zero_grad()
            text_loss(model, *batch).backward()
            if syncing is not None:
                syncing.finish_gradient_sync()
            optimizer.step()
            scheduler.step()

    def work(cluster: Cluster) -> None:
        reference = deep_gpt(0)
        trained(reference, torch.optim.AdamW(groups(reference), **options), None, text())
        for wrap in (ZeroOptimizer, ZeroGradientOptimizer):
            model = deep_gpt(0)
            optimizer = wrap(groups(model), torch.optim.AdamW, **options)
            trained(model, optimizer, optimizer, mine(cluster, text()))
            for name, tensor in reference.state_dict().items():
                torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-8, atol=1e-9, msg=name)

    run_ranks(work, 2)


def test_the_next_block_is_gathered_while_one_computes():
    def work(cluster: Cluster) -> None:
        model = FullyShardedDataParallel(Blocks())
        here: list[tuple[str, int, set[int]]] = []

        def look(when: str, k: int) -> None:
            here.append((when, k, {i for i, unit in enumerate(model.units) if not unit.is_freed}))

        for k, block in enumerate(model.module.blocks):
            block.register_forward_hook(lambda *_, k=k: look("forward", k), prepend=True)
            block.weight.register_post_accumulate_grad_hook(lambda _, k=k: look("backward", k))
        for _ in range(2):
            here.clear()
            model(torch.ones(2, 8)).sum().backward()
            model.finish_gradient_sync()
        forward = [("forward", k, {k, min(k + 1, 2)}) for k in range(3)]
        assert here == forward + [("backward", k, {k, max(k - 1, 0)}) for k in (2, 1, 0)], here
        assert all(unit.is_freed for unit in model.units)

    run_ranks(work, 2, timeout=20)
