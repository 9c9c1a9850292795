"""Test ZeRO with short tests, which are also run against the wrong implementations in exercises/mutants."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comm.cost import Link
from comm.wire import slow_link
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.memory import live_bytes
from tests.data_parallel.equivalence import EitherWay, Odd, examples, mine, odd_loss
from tests.data_parallel.small_models import Middle
from tests.zero.sharded import STAGES, Blocks, Sharded, compare_with_one_process, full_tensors, total
from zero import sharded_checkpoint
from zero.sharded_optimizer import ShardedOptimizer
from zero.train_zero3 import FullyShardedDataParallel


class Layer(nn.Module):
    """A block that checks that its parameters are gathered before it uses them."""

    def __init__(self, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(5, 5), shared or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        y = torch.tanh(self.own(x)) + self.shared(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.look("backward"))
        return y * 1.0

    def look(self, when: str = "forward") -> None:
        for name, parameter in self.named_parameters():
            assert type(parameter) is nn.Parameter, f"{name} is not here in the {when}"


class Layers(nn.Module):
    """A model of odd sizes, with a layer before the blocks and a layer that blocks share (stage 3's root)."""

    def __init__(self, seed: int, shares: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        shared = nn.Linear(5, 5) if shares else None
        self.enter, self.blocks = nn.Linear(7, 5), nn.ModuleList(Layer(shared) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def compare(*stages: str, make: Any = Layers, optimizer: str = "sgd", n: int = 2, **options: Any) -> None:
    """Compare gradients and parameters with one process in float64; each rank has other initial weights."""

    def work(cluster: Cluster) -> None:
        for stage in stages:
            batch = examples(cluster.world_size)
            compare_with_one_process(
                cluster, stage, optimizer, make, odd_loss, batch, **({"microbatches": (1, 1)} | options)
            )

    run_ranks(work, n, timeout=20)


def test_every_number_of_every_parameter_is_in_one_ranks_shard():
    compare("zero1", "zero3", n=3)


def test_a_gradient_is_the_mean_over_ranks_not_their_sum():
    compare(*STAGES)


def test_after_a_step_all_ranks_compute_with_the_new_parameters():
    compare(*STAGES, microbatches=(1, 1, 1))


def test_gradients_are_clipped_by_the_norm_over_all_shards():
    compare("zero1", "zero3", clip=0.01)


def test_the_gradients_of_all_microbatches_add_up_in_the_shards():
    compare("zero2", "zero3", microbatches=(3, 2))


def test_weight_decay_does_not_change_parameters_that_no_rank_used():
    compare(*STAGES, make=Odd, optimizer="adamw")


def test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all():
    steps = {"both": 1.5, "none": None, "rank 0": 0.5, "rank 1": 1.0}  # who uses it: the mean of its gradient

    def work(cluster: Cluster) -> None:
        for stage in STAGES:
            options = {} if stage == "zero3" else {"bucket_mb": 1e-6}
            sharded = Sharded(stage, Middle(), "sgd", **options)
            for users, middle in steps.items():
                uses_middle = users in ("both", f"rank {cluster.rank}")
                sharded.optimizer.zero_grad()
                sharded.model(torch.full((1,), cluster.rank + 1.0).double(), uses_middle).backward()
                sharded.syncing.finish_gradient_sync()
                expected = {key: torch.tensor([1.5]) for key in ("first", "last")}
                expected["middle"] = None if middle is None else torch.tensor([middle])
                found = full_tensors(sharded.pieces, lambda piece: piece.tensor.grad)
                assert_same(found, expected, what=f"gradient of {stage}, used by {users},")

    run_ranks(work, 2, timeout=20)


def test_a_block_is_gathered_during_its_forward_and_its_backward():
    compare("zero3")


def test_a_layer_shared_by_blocks_is_gathered_in_each_of_them():
    compare("zero3", make=lambda seed: Layers(seed, shares=True))


def test_the_next_block_is_gathered_while_one_computes():
    def work(cluster: Cluster) -> None:
        model = FullyShardedDataParallel(Blocks())
        here: list[tuple[str, int, set[int]]] = []

        def look(when: str, k: int) -> None:
            units = [unit for block in model.blocks for unit in block.units]
            here.append((when, k, {i for i, unit in enumerate(units) if unit.full is not None}))

        for k, block in enumerate(model.module.blocks):
            block.register_forward_hook(lambda *_, k=k: look("forward", k), prepend=True)
        with model.gathered():
            for k, block in enumerate(model.module.blocks):
                block.weight.register_hook(lambda _, k=k: look("backward", k))
        for _ in range(2):  # no rank knows the order in the first forward
            here.clear()
            model(torch.ones(2, 8)).sum().backward()
            model.finish_gradient_sync()
        forward = [("forward", k, {k, min(k + 1, 2)}) for k in range(3)]
        assert here == forward + [("backward", k, {k, max(k - 1, 0)}) for k in (2, 1, 0)], here

    run_ranks(work, 2, timeout=20)


def test_stage_2_keeps_only_its_shard_of_the_gradient():
    def work(cluster: Cluster) -> None:
        module = Blocks()
        gradients = sum(parameter.nbytes for parameter in module.parameters())
        ours = Sharded("zero2", module, "sgd")
        x = torch.ones(2, 8)
        before = live_bytes({})["other"]
        for _ in range(2):
            ours.optimizer.zero_grad()
            ours.accumulate(total, (x, x), 1)
            held = live_bytes({})["other"] - before
            assert held == gradients // 2, f"{held} bytes, and a shard of the gradient has {gradients // 2}"

    run_ranks(work, 2, timeout=20)


def test_at_most_three_buckets_of_gradients_are_alive():
    def work(cluster: Cluster) -> None:
        module = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(7))
        ours = Sharded("zero2", module, "sgd", bucket_mb=1e-6)
        optimizer = ours.optimizer
        alive: list[int] = []

        def look(_: Tensor) -> None:
            alive.append(len(optimizer._filling) + len(optimizer._in_flight))

        for layer in module:
            layer.weight.register_post_accumulate_grad_hook(look)
        with slow_link.slowed(Link(0.003, 0.0)):
            nn.Sequential(*module)(torch.ones(2, 8)).sum().backward()
            ours.optimizer.finish_gradient_sync()
        assert max(alive) <= 3, f"{max(alive)} of {len(optimizer.buckets)}"

    run_ranks(work, 2, timeout=20)


def test_the_backward_of_one_rank_may_run_in_another_order():
    """Both layers have one shape, so a message of one layer would fit where that of the other is expected."""

    def work(cluster: Cluster) -> None:
        x = torch.arange(12.0).double().view(4, 3) / 12
        for stage in ("zero1", "zero2"):
            ours = Sharded(stage, EitherWay(0, backwards=cluster.rank == 1), "sgd", bucket_mb=1e-6)
            ours.accumulate(lambda model, x, _: model(x).square().mean(), mine(cluster, (x, x)), 1)
            reference = EitherWay(0, backwards=False)
            reference(x).square().mean().backward()
            expected = {name: p.grad for name, p in reference.named_parameters()}
            assert_same(full_tensors(ours.pieces, lambda piece: piece.tensor.grad), expected, what=stage)

    run_ranks(work, 2, timeout=20)


def test_a_rank_loads_the_optimizer_state_of_its_own_shards():
    def train(ours: Sharded, cluster: Cluster) -> None:
        ours.optimizer.zero_grad()
        ours.accumulate(odd_loss, mine(cluster, examples(3)), 1)
        ours.optimizer.step()

    def work(cluster: Cluster, folder: str) -> None:
        at_once = Sharded("zero1", Layers(0), "adamw")
        train(at_once, cluster)
        sharded_checkpoint.save(cluster, folder, at_once.pieces, at_once.optimizer, {})
        train(at_once, cluster)
        for stage in ("zero1", "zero3"):
            resumed = Sharded(stage, Layers(5), "adamw")
            sharded_checkpoint.load(cluster, folder, resumed.pieces, resumed.optimizer)
            if isinstance(resumed.optimizer, ShardedOptimizer):
                resumed.optimizer.gather_parameters()
            train(resumed, cluster)
            ends = [full_tensors(run.pieces, lambda piece: piece.tensor) for run in (resumed, at_once)]
            assert_same(*ends, what=f"parameter, {stage},")

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            work, 3, str(Path(folder) / "run"), timeout=20
        )  # on 2 ranks a shard would end where a parameter ends
