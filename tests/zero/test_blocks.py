"""Test what is special to stage 3: which blocks are full when, which modules have blocks, and 16 bits.

tests/test_wrappers.py compares it, as all wrappers, with one process.
"""

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comm.cost import Link
from comm.wire import slow_link
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.trace.memory import live_bytes
from tests.equivalence import Trained, compare_with_one_process, mine, one_process
from tests.on_ranks import on_ranks
from tests.refusals import refusal, the_one_sentence
from tests.tasks import Blocks, Task, deep_gpt, text, text_loss
from tests.wrappers import Wrapper, for_each, named, select
from training.state_shards import plain_shards
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero3 import FullyShardedDataParallel
from zero.train_zero3_textbook import TextbookFullyShardedDataParallel

ZERO3 = named("zero3")


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@on_ranks(2)
def test_a_forward_after_a_step_uses_the_new_parameters_also_if_no_backward_came_before(
    cluster: Cluster, how: dict[str, bool]
):
    """A fused optimizer does not count its changes, so the root and the last block looked up to date."""
    plain, x = Blocks().double(), torch.ones(2, 8, dtype=torch.float64)
    model = FullyShardedDataParallel(Blocks().double())
    model.load_full_state_dict(plain.state_dict())
    both = [(plain, torch.optim.AdamW(plain.parameters(), lr=0.1, **how))]
    both.append((model, torch.optim.AdamW(model.parameters(), lr=0.1, **how)))
    for one, optimizer in both:
        one(x).square().sum().backward()
        if one is model:
            model.finish_gradient_sync()
        one(x)  # keeps the root and the last block full
        optimizer.step()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=0)
    loss = model(x).sum()
    both[1][1].step()
    with pytest.raises(WorkbookError, match="stepped between a forward and its backward"):
        loss.backward()


@on_ranks(2, timeout=20)
def test_the_next_block_is_gathered_while_one_computes(cluster: Cluster):
    model = FullyShardedDataParallel(Blocks())
    here: list = []

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


@on_ranks(2, timeout=30)
def test_stage_3_has_at_most_two_full_blocks_and_the_gradients_of_three(cluster: Cluster):
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    ours = Trained(ZERO3, module)
    full, gradients = [], []
    block = 64 * 64 * 4

    def look(*_: object) -> None:
        full.append(sum(not unit.is_freed for unit in ours.model.units))
        held = live_bytes({"shards": [unit.flat_shard for unit in ours.model.units]})["other"]
        gradients.append((held - before) / block)

    for layer in module:
        layer.register_forward_hook(look, prepend=True)
        layer.weight.register_post_accumulate_grad_hook(look)
    with slow_link.slowed(Link(0.002, 0.0)):
        x = torch.ones(4, 64)
        before = live_bytes({"shards": [unit.flat_shard for unit in ours.model.units]})["other"]
        ours.accumulate(lambda model, x, _: model(x).sum(), (x, x))
    assert max(full) == 2
    # Two full blocks, the gradients of three, and half a gradient of each of eight blocks.
    assert max(gradients) < 2 + 3 + 4 + 0.5, gradients


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


class BlocksLast(nn.Module):
    """A module that returns what its last block has made; one block returns its input."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.LayerNorm(5)])
        self.blocks[1].forward = lambda x: x
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def a_layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(7, 3).double()


@on_ranks(2, timeout=60)
def test_stage_3_takes_lists_in_lists_no_blocks_and_blocks_that_pass_their_input_on(cluster: Cluster):
    for make in (Nested, a_layer):
        compare_with_one_process(cluster, ZERO3, Task(make), (1, 3))


@dataclasses.dataclass
class Output:
    y: Tensor
    name: str = "as of a library of models"


class InDataclasses(nn.Module):
    """Its blocks return what `made` makes of a tensor."""

    def __init__(self, seed: int, made: Any = Output) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.made = nn.Linear(7, 5), made
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        for block in self.blocks:
            block.forward = lambda x, block=block: made(nn.functional.linear(x, block.weight, block.bias))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x).y.tanh()
        return x


@on_ranks(2)
def test_blocks_may_return_dataclasses_and_what_hides_its_tensors_is_refused(cluster: Cluster):
    for name in ("zero3", "hsdp"):
        compare_with_one_process(cluster, named(name), Task(InDataclasses), (1, 3))
    hidden, *_ = mine(cluster, Task(BlocksLast).batch(2))
    model = FullyShardedDataParallel(InDataclasses(0, lambda x: types.SimpleNamespace(y=x)))
    assert "returned SimpleNamespace, in which stage 3 finds no tensor" in refusal(model, hidden)
    model = TextbookFullyShardedDataParallel(InDataclasses(0))
    assert "returned Output, and this first look takes one tensor only" in refusal(model, hidden)


@for_each(select(takes_any_model=True, by_torch=False, stage=3))
@on_ranks(2)
def test_a_module_may_return_what_its_last_block_made_and_a_block_its_input(cluster, wrapper: Wrapper):
    compare_with_one_process(cluster, wrapper, Task(BlocksLast), (1, 3))


@on_ranks(2)
def test_an_evaluation_between_steps_changes_nothing_and_sees_the_new_parameters(cluster: Cluster):
    def losses(is_watched: bool) -> list[float]:
        ours, seen = Trained(ZERO3, deep_gpt(0), "adamw"), []
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


@on_ranks(2)
def test_bf16_computes_in_16_bits_and_keeps_shards_in_full_precision(cluster: Cluster):
    reference = deep_gpt(0).float()
    ours = Trained(ZERO3, deep_gpt(cluster.rank).float(), compute_dtype=torch.bfloat16)
    ours.accumulate(text_loss, mine(cluster, text()), 2)
    tensors = [tensor for s in ours.model.parameter_shards for tensor in (s.tensor, s.tensor.grad)]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert {unit.full.dtype for unit in ours.model.units} == {torch.bfloat16}
    change = ours.step()
    for name, expected in one_process(reference, lambda model: text_loss(model, *text())).items():
        if not name.endswith("k_proj.bias"):  # rounding is all that is left of its gradient
            assert (change[name] - expected).norm() / expected.norm() < 0.05, name


class Again(nn.Module):
    def __init__(self, seed: int, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.blocks = nn.Linear(7, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.is_checkpointed = is_checkpointed
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in (0, 1, 0, 2):
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=True) if self.is_checkpointed else block(x)
            x = x.tanh()
        return x


@on_ranks(2)
def test_a_block_in_reentrant_checkpoints_has_the_gradients_of_one_process(cluster: Cluster):
    make = lambda seed: Again(seed, is_checkpointed=True)  # noqa: E731
    compare_with_one_process(cluster, ZERO3, Task(Again), (1,), make=make)


def test_ranks_that_run_different_blocks_are_refused_on_all_ranks():
    def work(cluster: Cluster) -> str:
        model = FullyShardedDataParallel(Blocks())
        blocks = model.module.blocks
        model.module.forward = lambda x: blocks[2 * cluster.rank](blocks[0](x))
        with torch.no_grad():
            return refusal(model, torch.ones(2, 8))

    assert "gather the same tensors" in the_one_sentence(run_ranks(work, 2))


@on_ranks(2)
def test_the_gradient_of_a_shard_has_no_norm_of_its_own(cluster: Cluster):
    model = FullyShardedDataParallel(Blocks())
    model(torch.ones(2, 8)).sum().backward()
    model.finish_gradient_sync()
    gradient = next(model.parameters()).grad
    wholes = [Tensor.norm, Tensor.count_nonzero, lambda g: g.flatten() @ g.flatten(), Tensor.aminmax]
    for whole in wholes:
        with pytest.raises(WorkbookError, match="clip_grad_norm_"):
            whole(gradient)
    assert gradient.clamp(-1, 1).mul(2).shape == gradient.shape


@on_ranks(2)
def test_a_wrong_option_of_the_optimizer_has_the_optimizers_own_error(cluster: Cluster):
    with pytest.raises(TypeError, match="unexpected keyword"):
        ZeroOptimizer(Blocks().parameters(), torch.optim.SGD, learning=0.1)


@on_ranks(2)
def test_a_compiled_models_checkpoint_has_the_names_of_the_plain_model(cluster: Cluster):
    class Compiled(nn.Module):  # torch.compile would import a compiler for seconds
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Blocks()

    model = Compiled()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    plain = plain_shards(model, torch.optim.SGD(model.parameters()))
    for shards in (optimizer.state_shards(model), plain):
        names = {shard.name for shard in shards if shard.optimizer is None}
        assert names == {f"model/blocks.{i}.weight" for i in range(3)}
