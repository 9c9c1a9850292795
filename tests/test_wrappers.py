"""Test what all wrappers promise: replicas, ZeRO, what sends less, and what divides a model or its tokens.

Each has every gradient of one process in float64, for tied, frozen, shared and unused parameters, odd shapes
and strides, microbatches, groups and any number of ranks. It sends what its formula says, and refuses what
would train wrongly without an error.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comm.cost import Link
from comm.wire import slow_link
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.blocks import recompute_blocks
from lab.models.model import BabyCNN
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tests.wrappers import (
    BRANCHES,
    CONTEXTS,
    DEEP,
    DIVIDED,
    DTENSORS,
    FEW,
    NAMES,
    OF_PARAMETERS,
    OURS,
    OVERLAPPING,
    REPLICAS,
    SHARDED,
    SHARED,
    SIDE_BY_SIDE,
    TENSORS,
    TEXT,
    TINY,
    ZERO_STAGES,
    Blocks,
    EitherWay,
    Layers,
    Task,
    Trained,
    X,
    compare_with_one_process,
    deep_gpt,
    examples,
    heads_task,
    in_pairs,
    layers,
    mean_square,
    mine,
    no_sync,
    odd_loss,
    one_process,
    text,
    text_loss,
)
from training.report import replica_digests
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero3 import FullyShardedDataParallel


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_as_one_process(name: str):
    def work(cluster: Cluster) -> None:
        for optimizer in ("sgd", "adamw"):
            compare_with_one_process(cluster, name, SHARED, (1, 1), optimizer)

    run_ranks(work, 2, timeout=20)


@pytest.mark.parametrize("name", NAMES)
def test_three_ranks_train_odd_models_with_microbatches_as_one_process(name: str):
    """The model has tied, frozen and unused parameters, and layers that only some ranks use."""

    def work(cluster: Cluster) -> None:
        for optimizer in ("sgd", "adamw"):
            ours = compare_with_one_process(cluster, name, BRANCHES, (1, 2, 1), optimizer)
        if name in REPLICAS:
            assert len(set(replica_digests(cluster, ours.model))) == 1

    run_ranks(work, 3, timeout=20)


@pytest.mark.parametrize("name", [*REPLICAS, *OF_PARAMETERS])
def test_one_rank_may_compute_gradients_in_another_order(name: str):
    def work(cluster: Cluster) -> None:
        def make(seed: int) -> nn.Module:
            return EitherWay(seed, backwards=cluster.rank == 1)

        each = {"bucket_mb": TINY} if name == "zero2" else {}  # and zero1 has several layers in a bucket
        compare_with_one_process(cluster, name, SIDE_BY_SIDE, (1, 1), make=make, **each)

    run_ranks(work, 2, timeout=20)


@pytest.mark.parametrize("name", NAMES[:-1])  # hsdp has two groups
def test_ranks_of_a_group_train_without_the_others(name: str):
    """Ranks 0 and 2, and 1 and 3, have other data and other initial weights."""

    def work(cluster: Cluster) -> None:
        group, number, rank = in_pairs(cluster)
        pair = dataclasses.replace(cluster, rank=rank, world_size=2)
        loss = lambda model, x, _: mean_square(model, x)  # noqa: E731
        task = Task(lambda seed: layers(10 * number + seed), loss, lambda _: (X + number, X))
        compare_with_one_process(pair, name, task, (1, 1), group=group)

    run_ranks(work, 4, timeout=20)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_any_number_of_ranks_trains_any_model_as_one_process(n: int):
    def work(cluster: Cluster) -> None:
        for name in NAMES:
            if n == 3:
                compare_with_one_process(cluster, name, TEXT, (2,))
            else:
                compare_with_one_process(cluster, name, BRANCHES, (3, 1), "momentum")
            if name in SHARDED and n == 3:
                compare_with_one_process(cluster, name, TEXT, (1, 3), "adamw", clip=0.01)
            if name in SHARDED and n == 4:
                compare_with_one_process(cluster, name, FEW, (1, 3), "momentum")
                compare_with_one_process(cluster, name, SHARED, (1, 3), "momentum", clip=0.01)

    run_ranks(work, n, timeout=120)


SOME = ("position_embedding", "blocks.0.attention.q_proj", "blocks.1.mlp.up_proj.bias", "final_norm.w")
MOST = ("token_embedding", "position_embedding", "blocks.0", "head")


@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process(name: str):
    def work(cluster: Cluster) -> None:
        compare_with_one_process(cluster, name, heads_task(), (1, 2))
        if name in DTENSORS:  # torch's clips by its own function
            return
        for frozen in (SOME, MOST):
            task = heads_task(11, frozen=frozen, num_layers=2, tied=False)
            compare_with_one_process(cluster, name, task, (1,), clip=0.1)

    run_ranks(work, 2, timeout=20)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_any_number_of_ranks_divides_a_model_or_its_tokens_and_trains_as_one_process(n: int):
    def work(cluster: Cluster) -> None:
        for name in DIVIDED:
            compare_with_one_process(cluster, name, heads_task(), (1, 1))
            if n != 3:
                continue
            shared = {"num_kv_heads": 6, "tied": False}  # query heads stay on the rank of their keys
            compare_with_one_process(cluster, name, heads_task(12, **shared), (1,))
            for tokens in (1, 17) if name not in DTENSORS else ():
                compare_with_one_process(cluster, name, heads_task(tokens, **shared), (1,), clip=0.1)
            if name in TENSORS:
                compare_with_one_process(cluster, name, heads_task(), (1,), clip=0.1, overlap=False)

    run_ranks(work, n, timeout=60)


def test_gradients_are_clipped_by_the_norm_of_one_process():
    """Squares of all shards add up, and parameters that each rank has count once."""

    def work(cluster: Cluster) -> None:
        for name in SHARDED:
            compare_with_one_process(cluster, name, SHARED, (1, 1), clip=0.01)
        for name in (*TENSORS, *CONTEXTS):
            compare_with_one_process(cluster, name, heads_task(), (1,), clip=1e-3)

    run_ranks(work, 2, timeout=20)


def test_bucket_sizes_patterns_options_and_a_slow_link_do_not_change_the_result():
    def recomputed(seed: int) -> nn.Module:
        model = deep_gpt(seed)
        recompute_blocks(model)
        return model

    def work(cluster: Cluster) -> None:
        for stage in ("zero1", "zero2"):
            options = {"bucket_mb": 4e-4, "pattern": "tree"}
            compare_with_one_process(cluster, stage, BRANCHES, (2, 1), "adamw", **options)
        ways: list[dict[str, Any]] = [{"reshard_after_forward": False, "pattern": "ring"}, {}]
        for make, way in zip((deep_gpt, recomputed), ways, strict=True):
            compare_with_one_process(cluster, "zero3", DEEP, (1, 2), "adamw", make=make, **way)
        with slow_link.slowed(Link(0.002, 0.0)):
            for stage in ZERO_STAGES:
                compare_with_one_process(cluster, stage, SHARED, (2, 1))

    run_ranks(work, 3, timeout=60)


def test_a_step_sends_what_the_formula_says_and_replicas_nothing_before_the_last_microbatch():
    def work(cluster: Cluster) -> None:
        ways: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in NAMES if name != "ddp"]
        ways += [(stage, {"pattern": "tree"}) for stage in ZERO_STAGES]
        half = {"reshard_after_forward": False, "compute_dtype": torch.bfloat16}
        ways += [("zero3", half), ("hsdp", half)]
        for name, options in ways:
            for task, microbatches, clip in ((DEEP, 2, 1.0), (BRANCHES, 1, None)):
                if task is BRANCHES and options:
                    continue
                ours = Trained(name, task.make(0), "adamw", **options)
                own = mine(cluster, task.batch(cluster.world_size))
                before, expected = LEDGER.total(), (microbatches if name != "zero1" else 1,)
                if name in REPLICAS:
                    expected, clip = (), None
                    with no_sync(ours.model):
                        task.loss(ours.model, *own).backward()
                    assert LEDGER.total() == before, name
                ours.accumulate(task.loss, own, microbatches)
                if clip is not None:
                    ours.syncing.clip_grad_norm_(clip)
                ours.optimizer.step()
                is_clipped = {} if name in REPLICAS else {"is_clipped": clip is not None}
                expected = () if name == "zero1_textbook" else expected
                formula = ours.syncing.traffic(*expected, **is_clipped)
                assert LEDGER.total() - before == formula, (name, options)

    for world_size in (1, 3, 4):
        run_ranks(work, world_size, timeout=60)


def test_fused_optimizers_find_gradients_in_the_order_of_their_parameters():
    """channels_last permutes strides, and a fused optimizer pairs elements by their place in memory."""

    def trained(model: Any, module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            odd_loss(model, x, y).backward()
            if model is not module:
                model.finish_gradient_sync()
            optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def cnn() -> BabyCNN:
        return BabyCNN().double().to(memory_format=torch.channels_last)

    def work(cluster: Cluster) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(10, (8,), generator=generator)
        module = cnn()
        expected = trained(module, module, x, y)
        for name, wrap in OURS.items():
            module = cnn()
            own = trained(wrap(module), module, x.chunk(2)[cluster.rank], y.chunk(2)[cluster.rank])
            assert_same(own, expected, what=f"parameter of {name}")

    run_ranks(work, 2)


def test_parameters_may_be_in_groups_with_their_own_options_and_a_scheduler():
    options = {"lr": 0.01, "eps": 1e-3}

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        """Divide by dims, as is done for weight decay: a shard has those of its full parameter."""
        matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.5}]

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
        reference, batch = deep_gpt(0), mine(cluster, text())
        trained(reference, torch.optim.AdamW(groups(reference), **options), None, text())
        for zero in (OF_PARAMETERS["zero1"], OF_PARAMETERS["zero2"]):
            model = deep_gpt(0)
            optimizer = zero(groups(model), torch.optim.AdamW, **options)
            trained(model, optimizer, optimizer, batch)
            assert_same(model.state_dict(), reference.state_dict(), 1e-8, "parameter")
        model = FullyShardedDataParallel(deep_gpt(0))
        trained(model, torch.optim.AdamW(groups(model), **options), model, batch)
        assert_same(model.full_state_dict(), reference.state_dict(), 1e-8, "parameter")

    run_ranks(work, 2)


def test_after_an_error_in_a_backward_finish_gradient_sync_and_zero_grad_let_training_continue():
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def work(cluster: Cluster) -> None:
        batch = examples(cluster.world_size)
        for name in OURS:
            ours = Trained(name, BRANCHES.make(cluster.rank))
            for failing_ranks in ((0, 1), (1,)):
                if cluster.rank in failing_ranks:
                    hook = ours.module.first.weight.register_hook(fail)
                    with pytest.raises(ZeroDivisionError):
                        odd_loss(ours.model, *mine(cluster, batch)).backward()
                    hook.remove()
                else:
                    odd_loss(ours.model, *mine(cluster, batch)).backward()
                ours.model.finish_gradient_sync()
                ours.model.zero_grad()
            expected = one_process(BRANCHES.make(0), lambda model: odd_loss(model, *batch))
            ours.accumulate(odd_loss, mine(cluster, batch), 2)
            change = ours.step()
            assert_same({key: change[key] for key in expected}, expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def test_a_copy_of_a_wrapper_with_a_group_of_its_own_sends_in_the_same_group():
    def work(cluster: Cluster) -> None:
        group = in_pairs(cluster)[0]
        for wrap in OURS.values():
            assert copy.deepcopy(wrap(nn.Linear(2, 2), group)).group is group

    run_ranks(work, 4)


def blocks(name: str) -> Trained:
    return Trained(name, Blocks())


def backward(ours: Trained) -> Tensor:
    loss = ours.model(torch.ones(2, 8)).sum()
    loss.backward()
    return loss


def finished(name: str = "zero3") -> Trained:
    ours = blocks(name)
    backward(ours)
    ours.syncing.finish_gradient_sync()
    return ours


def goes_backward_twice(name: str) -> None:
    ours = blocks(name)
    backward(ours)
    backward(ours)


def goes_backward_again_without_a_sync(name: str) -> None:
    ours = blocks(name)
    backward(ours)
    ours.model.zero_grad()
    with no_sync(ours.model):
        backward(ours)


def steps_before_it_finishes(name: str) -> None:
    ours = blocks(name)
    backward(ours)
    ours.optimizer.step()


def steps_after_no_sync(name: str) -> None:
    ours = blocks(name)
    with no_sync(ours.model):
        backward(ours)
    ours.optimizer.step()


def steps_with_a_closure(name: str) -> None:
    ours = blocks(name)
    ours.optimizer.step(lambda: backward(ours))


def adds_a_layer(name: str) -> None:
    ours = finished(name)
    ours.module.blocks.append(nn.Linear(8, 8))
    backward(ours)


def freezes_a_layer(name: str) -> None:
    ours = finished(name)
    ours.module.blocks[1].requires_grad_(False)
    backward(ours)
    ours.syncing.finish_gradient_sync()


class Compiled(nn.Module):  # torch.compile would import a compiler for seconds
    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = Blocks()


class Twice(nn.Module):
    """Runs a layer in two checkpoints; reentrant ones are backwards of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.inner, self.first(x), use_reentrant=True)
        return x


def goes_backward_after_a_step(name: str) -> None:
    ours = finished(name)
    loss = ours.model(torch.ones(2, 8)).sum()
    ours.optimizer.step()
    loss.backward()


def adds_a_group(name: str) -> None:
    blocks(name).optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def clips_before_it_finishes(name: str) -> None:
    ours = blocks(name)
    backward(ours)
    ours.syncing.clip_grad_norm_(1.0)


def takes_the_norm_of_a_shard(name: str) -> None:
    [first, *_] = finished(name).optimizer.param_groups[0]["params"]
    first.grad.square().sum()


def watches_shards(name: str) -> None:
    ours = blocks(name)
    for shard in ours.model.parameters():
        shard.register_post_accumulate_grad_hook(lambda _: None)
    backward(ours)
    ours.model.finish_gradient_sync()


def compiles_in_place(name: str) -> None:
    module = Blocks()
    module.compile(backend="eager")
    Trained(name, module)


def compiles_a_block_after_wrapping(name: str) -> None:
    ours = blocks(name)
    ours.model.module.blocks[1].compile(backend="eager")
    backward(ours)


ZERO3, PLAIN = ("zero3",), tuple(OURS)
REFUSED: list[tuple[Callable[[str], object], Sequence[str], str]] = [
    (goes_backward_twice, (*OVERLAPPING, "zero1"), "Another backward"),
    (goes_backward_again_without_a_sync, OVERLAPPING, "Another backward began before finish"),
    (steps_before_it_finishes, (*PLAIN, "zero3_textbook", "zero3", "hsdp"), "^Call finish_gradient_sync"),
    (steps_after_no_sync, (*PLAIN, "hsdp"), "^Call finish_gradient_sync"),
    (steps_with_a_closure, (*PLAIN, "zero3"), "without a closure"),
    (steps_with_a_closure, ("zero1", "zero2"), "takes no closure"),
    (adds_a_layer, PLAIN, r"^The parameter blocks.3.weight was added, .* after wrapping"),
    (freezes_a_layer, PLAIN, r"^The parameter blocks.1.weight was added, .* frozen, .* after wrapping"),
    (freezes_a_layer, ZERO_STAGES, "after wrapping"),
    (lambda name: Trained(name, nn.Embedding(5, 2, sparse=True)), (*PLAIN, "zero3"), "sparse"),
    (lambda name: Trained(name, Compiled()), PLAIN, r"module\.compile\(\)"),
    (compiles_in_place, ZERO3, "compiled code"),
    (compiles_a_block_after_wrapping, ZERO3, "compiled code"),
    (lambda name: Trained(name, Twice()).model(X).sum().backward(), PLAIN[1:], "use_reentrant=False"),
    (goes_backward_after_a_step, ("zero3", "zero3_textbook"), "stepped between a forward and its backward"),
    (takes_the_norm_of_a_shard, ZERO_STAGES, "shard only"),
    (lambda _: nn.utils.clip_grad_norm_(finished().model.parameters(), 1.0), ZERO3, "shard only"),
    (clips_before_it_finishes, ZERO3, "finish_gradient_sync"),
    (watches_shards, ZERO3, "never run"),
    (lambda _: torch.optim.Adafactor(finished().model.parameters()).step(), ZERO3, "element by element"),
    (lambda _: ZeroOptimizer(Blocks().parameters(), torch.optim.Adafactor), ["zero1"], "element by element"),
    (lambda _: copy.deepcopy(finished().model), ZERO3, "full_state_dict"),
    (lambda name: blocks(name).model.state_dict(), ZERO3, "full_state_dict"),
    (lambda name: blocks(name).optimizer.state_dict(), ["zero1"], "its own shards only"),
    (adds_a_group, ["zero2"], "all of them at once"),
    (lambda _: FullyShardedDataParallel(nn.BatchNorm1d(3), None, torch.bfloat16), ZERO3, "no buffers"),
]


def test_what_would_train_wrongly_is_refused_in_a_sentence():
    def work(cluster: Cluster) -> None:
        for use, names, sentence in REFUSED:
            for name in names:
                with pytest.raises(WorkbookError, match=sentence):
                    use(name)

    run_ranks(work, 2, timeout=60)


def test_a_refused_step_can_be_taken_after_finish_gradient_sync():
    def work(cluster: Cluster) -> None:
        for name in (*OURS, "hsdp"):
            compared = compare_with_one_process(cluster, name, SHARED, (1,))
            compared.optimizer.zero_grad()
            ours, x = compared.model, mine(cluster, examples(2))[0]
            with no_sync(ours):
                ours(x).sum().backward()
            with pytest.raises(WorkbookError, match="Call finish_gradient_sync"):
                compared.optimizer.step()
            ours.finish_gradient_sync()
            compared.optimizer.step()

    run_ranks(work, 2)


def test_a_graph_may_have_several_backwards_and_stage_3_gathers_for_each():
    def work(cluster: Cluster) -> None:
        batch = examples(cluster.world_size)
        expected = one_process(Layers(0), lambda model: odd_loss(model, *batch))
        for name in ("zero3_textbook", "zero3", "hsdp"):
            ours = Trained(name, Layers(cluster.rank))
            loss = odd_loss(ours.model, *mine(cluster, batch))
            for _ in range(2):
                loss.backward(retain_graph=True)
                ours.model.finish_gradient_sync()
            change = ours.step()
            assert_same({key: change[key] / 2 for key in expected}, expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def test_a_full_state_goes_into_another_sharded_model():
    def work(cluster: Cluster) -> None:
        state = Layers(3).state_dict()
        for name in ("zero3_textbook", "zero3", "hsdp"):
            model = Trained(name, Layers(cluster.rank)).model
            model.load_full_state_dict(state)
            assert_same(model.full_state_dict(), state, 0)
            with model.gathered() as full:
                assert_same(full.state_dict(), state, 0)

    run_ranks(work, 3)
