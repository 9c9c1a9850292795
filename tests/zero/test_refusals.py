"""Test that ZeRO refuses, in a sentence, what would train wrongly without an error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.zero.sharded import STAGES, Blocks, Sharded
from training.state_shards import plain_shards
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero3 import FullyShardedDataParallel


def backward(ours: Sharded) -> None:
    ours.model(torch.ones(2, 8)).sum().backward()


def forgets_to_finish(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    ours.optimizer.step()
    ours.optimizer.zero_grad()
    backward(ours)


def goes_backward_twice(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    backward(ours)


def goes_backward_without_a_forward(_: str) -> None:
    model = FullyShardedDataParallel(Blocks())
    loss = model(torch.ones(2, 8)).sum()
    loss.backward(retain_graph=True)
    model.finish_gradient_sync()
    loss.backward()


def goes_backward_after_a_step(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    ours.model.finish_gradient_sync()
    loss = ours.model(torch.ones(2, 8)).sum()
    ours.optimizer.step()
    loss.backward()


def freezes_a_layer(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    ours.module.blocks[1].requires_grad_(False)
    backward(ours)
    ours.syncing.finish_gradient_sync()


def adds_a_group(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    ours.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def forgets_to_finish_in_the_first_step(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    ours.optimizer.step()


def steps_with_a_closure(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    ours.optimizer.step(lambda: backward(ours))


def finished(**options: Any) -> FullyShardedDataParallel:
    model = FullyShardedDataParallel(Blocks(), **options)
    model(torch.ones(2, 8)).sum().backward()
    model.finish_gradient_sync()
    return model


def takes_the_norm_of_a_shard(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    ours.syncing.finish_gradient_sync()
    [first, *_] = ours.optimizer.param_groups[0]["params"]
    first.grad.square().sum()


def clips_as_one_process_does(_: str) -> None:
    torch.nn.utils.clip_grad_norm_(finished().parameters(), 1.0)


def clips_before_it_finishes(stage: str) -> None:
    ours = Sharded(stage, Blocks(), "sgd")
    backward(ours)
    ours.syncing.clip_grad_norm_(1.0)


def watches_shards(_: str) -> None:
    model = FullyShardedDataParallel(Blocks())
    for shard in model.parameters():
        shard.register_post_accumulate_grad_hook(lambda _: None)
    model(torch.ones(2, 8)).sum().backward()
    model.finish_gradient_sync()


def compiles_in_place(_: str) -> None:
    module = Blocks()
    module.compile(backend="eager")
    FullyShardedDataParallel(module)


def compiles_a_block_after_wrapping(_: str) -> None:
    model = FullyShardedDataParallel(Blocks())
    model.module.blocks[1].compile(backend="eager")
    model(torch.ones(2, 8))


REFUSED: list[tuple[Callable[[str], object], list[str], str]] = [
    (forgets_to_finish, ["zero3"], "finish_gradient_sync"),
    (forgets_to_finish_in_the_first_step, ["zero3"], "finish_gradient_sync"),
    (steps_with_a_closure, ["zero1", "zero2"], "takes no closure"),
    (steps_with_a_closure, ["zero3"], "finish_gradient_sync"),
    (takes_the_norm_of_a_shard, STAGES, "shard only"),
    (clips_as_one_process_does, ["zero3"], "shard only"),
    (clips_before_it_finishes, ["zero3"], "finish_gradient_sync"),
    (watches_shards, ["zero3"], "never run"),
    (compiles_in_place, ["zero3"], "compiled code"),
    (compiles_a_block_after_wrapping, ["zero3"], "compiled code"),
    (lambda _: torch.optim.Adafactor(finished().parameters()).step(), ["zero3"], "element by element"),
    (lambda _: copy.deepcopy(finished()), ["zero3"], "full_state_dict"),
    (lambda _: FullyShardedDataParallel(nn.BatchNorm1d(3), None, torch.bfloat16), ["zero3"], "no buffers"),
    (goes_backward_twice, ["zero1"], "Another backward"),
    (goes_backward_without_a_forward, ["zero3"], "without a forward before it"),
    (goes_backward_after_a_step, ["zero3"], "stepped between a forward and its backward"),
    (freezes_a_layer, STAGES, "after wrapping"),
    (adds_a_group, ["zero2"], "all of them at once"),
    (
        lambda _: ZeroOptimizer(Blocks().parameters(), torch.optim.Adafactor),
        ["zero1"],
        "element by element",
    ),
    (lambda s: Sharded(s, Blocks(), "sgd").optimizer.state_dict(), ["zero1"], "its own shards only"),
    (lambda _: FullyShardedDataParallel(Blocks()).state_dict(), ["zero3"], "full_state_dict"),
    (lambda _: FullyShardedDataParallel(nn.Embedding(3, 2, sparse=True)), ["zero3"], "sparse"),
]


def test_what_would_train_wrongly_is_refused_in_a_sentence():
    def on_a_rank(cluster: Cluster) -> None:
        for work, stages, sentence in REFUSED:
            for stage in stages:
                with pytest.raises(WorkbookError, match=sentence):
                    work(stage)

    run_ranks(on_a_rank, 2, timeout=20)


def test_ranks_that_run_different_blocks_are_refused_on_all_ranks():
    def work(cluster: Cluster) -> str:
        model = FullyShardedDataParallel(Blocks())
        blocks = model.module.blocks
        model.module.forward = lambda x: blocks[2 * cluster.rank](blocks[0](x))
        with torch.no_grad(), pytest.raises(WorkbookError) as refusal:
            model(torch.ones(2, 8))
        return str(refusal.value)

    [sentence] = set(run_ranks(work, 2))
    assert "gather the same units" in sentence


def test_the_gradient_of_a_shard_has_no_norm_of_its_own():
    def work(cluster: Cluster) -> None:
        gradient = next(finished().parameters()).grad
        wholes = [Tensor.norm, Tensor.count_nonzero, lambda g: g.flatten() @ g.flatten(), Tensor.aminmax]
        for whole in wholes:
            with pytest.raises(WorkbookError, match="clip_grad_norm_"):
                whole(gradient)
        assert gradient.clamp(-1, 1).mul(2).shape == gradient.shape

    run_ranks(work, 2)


def test_groups_by_the_number_of_dimensions_decay_what_they_decay_on_one_process():
    def trained(model: Any, module: nn.Module, x: Tensor) -> None:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        model(x).square().mean().backward()
        if model is not module:
            model.finish_gradient_sync()
        optimizer.step()

    def work(cluster: Cluster) -> None:
        torch.manual_seed(0)
        alone, module = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double() for _ in range(2))
        module.load_state_dict(alone.state_dict())
        x = torch.randn(4, 3, dtype=torch.float64)
        trained(alone, alone, x)
        model = FullyShardedDataParallel(module)
        trained(model, module, x.chunk(2)[cluster.rank])
        assert_same(model.full_state_dict(), alone.state_dict())

    run_ranks(work, 2)


def test_a_wrong_option_of_the_optimizer_has_the_optimizers_own_error():
    def work(cluster: Cluster) -> None:
        with pytest.raises(TypeError, match="unexpected keyword"):
            ZeroOptimizer(Blocks().parameters(), torch.optim.SGD, learning=0.1)

    run_ranks(work, 2)


def test_a_compiled_models_checkpoint_has_the_names_of_the_plain_model():
    class Compiled(nn.Module):  # torch.compile would import a compiler for seconds
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Blocks()

    def work(cluster: Cluster) -> None:
        model = Compiled()
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        plain = plain_shards(model, torch.optim.SGD(model.parameters()))
        for shards in (optimizer.shards(model), plain):
            names = {shard.name for shard in shards if shard.optimizer is None}
            assert names == {f"model/blocks.{i}.weight" for i in range(3)}

    run_ranks(work, 2)


def test_a_block_in_reentrant_checkpoints_has_the_gradients_of_one_process():
    class Twice(nn.Module):
        def __init__(self, is_checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.is_checkpointed = is_checkpointed
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for number in (0, 1, 0, 2):
                block = self.blocks[number]
                x = checkpoint(block, x, use_reentrant=True) if self.is_checkpointed else block(x)
                x = x.tanh()
            return x

    def work(cluster: Cluster) -> None:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        alone = Twice(False)
        alone(x).square().mean().backward()
        model = FullyShardedDataParallel(Twice(True))
        model(x.chunk(2)[cluster.rank]).square().mean().backward()
        model.finish_gradient_sync()
        expected = dict(alone.named_parameters())
        for name, shard in zip((n for n, _ in model.named_parameters()), model.parameter_shards, strict=True):
            own = expected[name].grad.flatten()[shard.start : shard.start + shard.tensor.numel()]
            assert_same({name: shard.tensor.grad.flatten()}, {name: own})

    run_ranks(work, 2)
