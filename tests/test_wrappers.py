"""Test what all wrappers promise: replicas, ZeRO, what sends less, and what divides a model or its tokens.

Each has every gradient of one process in float64, for tied, frozen, shared and unused parameters, odd shapes
and strides, microbatches, groups and any number of ranks. It sends what its formula says, and refuses what
would train wrongly without an error.
"""

import copy
import dataclasses
import io
import math
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
from lab.trace.ledger import LEDGER
from tests.equivalence import Trained, compare_with_one_process, in_pairs, mine, no_sync, one_process
from tests.on_ranks import on_ranks
from tests.tasks import (
    BRANCHES,
    DEEP,
    FEW,
    SHARED,
    SIDE_BY_SIDE,
    TEXT,
    Blocks,
    EitherWay,
    Layers,
    Task,
    X,
    deep_gpt,
    examples,
    heads_task,
    layers,
    mean_square,
    odd_loss,
    text,
    text_loss,
)
from tests.wrappers import TINY, Wrapper, for_each, named, select
from training.report import replica_digests
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero3 import FullyShardedDataParallel

PLAIN = select(lesson="data_parallel", by_torch=False)
OVERLAPPING = select(lesson="data_parallel", by_torch=False, overlaps=True)
STAGES = select(lesson="zero", by_torch=False, overlaps=True)
ZERO3 = [named("zero3")]


@for_each(select(takes_any_model=True))
@on_ranks(2, timeout=20)
def test_two_ranks_train_as_one_process(cluster: Cluster, wrapper: Wrapper):
    for optimizer in ("sgd", "adamw"):
        compare_with_one_process(cluster, wrapper, SHARED, (1, 1), optimizer)


@for_each(select(takes_any_model=True))
@on_ranks(3, timeout=20)
def test_three_ranks_train_odd_models_with_microbatches_as_one_process(cluster: Cluster, wrapper: Wrapper):
    """The model has tied, frozen and unused parameters, and layers that only some ranks use."""
    for optimizer in ("sgd", "adamw"):
        ours = compare_with_one_process(cluster, wrapper, BRANCHES, (1, 2, 1), optimizer)
    if wrapper.is_replica:
        assert len(set(replica_digests(cluster, ours.model))) == 1


@for_each([*select(is_replica=True), *select(is_optimizer=True)])
@on_ranks(2, timeout=20)
def test_one_rank_may_compute_gradients_in_another_order(cluster: Cluster, wrapper: Wrapper):
    def make(seed: int) -> nn.Module:
        return EitherWay(seed, backwards=cluster.rank == 1)

    each = {"bucket_mb": TINY} if wrapper.stage == 2 else {}  # and zero1 has several layers in a bucket
    compare_with_one_process(cluster, wrapper, SIDE_BY_SIDE, (1, 1), make=make, **each)


@for_each(select(takes_any_model=True, takes_group=True))
@on_ranks(4, timeout=20)
def test_ranks_of_a_group_train_without_the_others(cluster: Cluster, wrapper: Wrapper):
    """Ranks 0 and 2, and 1 and 3, have other data and other initial weights."""
    group, number, rank = in_pairs(cluster)
    pair = dataclasses.replace(cluster, rank=rank, world_size=2)
    loss = lambda model, x, _: mean_square(model, x)  # noqa: E731
    task = Task(lambda seed: layers(10 * number + seed), loss, lambda _: (X + number, X))
    compare_with_one_process(pair, wrapper, task, (1, 1), group=group)


@pytest.mark.parametrize("n", [1, 3, 4])
@on_ranks("n", timeout=120)
def test_any_number_of_ranks_trains_any_model_as_one_process(cluster: Cluster, n: int):
    for wrapper in select(takes_any_model=True):
        if n == 3:
            compare_with_one_process(cluster, wrapper, TEXT, (2,))
        else:
            compare_with_one_process(cluster, wrapper, BRANCHES, (3, 1), "momentum")
        if wrapper.clips and n == 3:
            compare_with_one_process(cluster, wrapper, TEXT, (1, 3), "adamw", clip=0.01)
        if wrapper.clips and n == 4:
            compare_with_one_process(cluster, wrapper, FEW, (1, 3), "momentum")
            compare_with_one_process(cluster, wrapper, SHARED, (1, 3), "momentum", clip=0.01)


SOME = ("position_embedding", "blocks.0.attention.q_proj", "blocks.1.mlp.up_proj.bias", "final_norm.w")
MOST = ("token_embedding", "position_embedding", "blocks.0", "head")


@for_each(select(takes_full_batch=True))
@on_ranks(2, timeout=20)
def test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process(cluster: Cluster, wrapper: Wrapper):
    compare_with_one_process(cluster, wrapper, heads_task(), (1, 2))
    if not wrapper.clips:  # torch's clips by its own function
        return
    for frozen in (SOME, MOST):
        task = heads_task(11, frozen=frozen, num_layers=2, tied=False)
        compare_with_one_process(cluster, wrapper, task, (1,), clip=0.1)


@pytest.mark.parametrize("n", [1, 3, 4])
@on_ranks("n", timeout=60)
def test_any_number_of_ranks_divides_a_model_or_its_tokens_and_trains_as_one_process(
    cluster: Cluster, n: int
):
    for wrapper in select(takes_full_batch=True):
        compare_with_one_process(cluster, wrapper, heads_task(), (1, 1))
        if n != 3:
            continue
        shared = {"num_kv_heads": 6, "tied": False}  # query heads stay on the rank of their keys
        compare_with_one_process(cluster, wrapper, heads_task(12, **shared), (1,))
        for tokens in (1, 17) if wrapper.clips else ():
            compare_with_one_process(cluster, wrapper, heads_task(tokens, **shared), (1,), clip=0.1)
        if wrapper.lesson == "tensor_parallel" and not wrapper.by_torch:
            compare_with_one_process(cluster, wrapper, heads_task(), (1,), clip=0.1, overlap=False)


@on_ranks(2, timeout=20)
def test_gradients_are_clipped_by_the_norm_of_one_process(cluster: Cluster):
    """Squares of all shards add up, and parameters that each rank has count once."""
    for wrapper in select(takes_any_model=True, clips=True):
        compare_with_one_process(cluster, wrapper, SHARED, (1, 1), clip=0.01)
    for wrapper in select(takes_full_batch=True, clips=True):
        compare_with_one_process(cluster, wrapper, heads_task(), (1,), clip=1e-3)


@on_ranks(3, timeout=60)
def test_gradients_are_clipped_by_any_norm_as_on_one_process(cluster: Cluster):
    """Some ranks have empty shards here, which have no largest number."""
    for norm_type, clip in ((1.0, 1.0), (2.5, 0.01), (math.inf, 0.01)):
        for wrapper in select(clips=True):
            task = heads_task() if wrapper.takes_full_batch else FEW
            compare_with_one_process(cluster, wrapper, task, (1,), clip=clip, norm_type=norm_type)


@on_ranks(3, timeout=60)
def test_bucket_sizes_patterns_options_and_a_slow_link_do_not_change_the_result(cluster: Cluster):
    def recomputed(seed: int) -> nn.Module:
        model = deep_gpt(seed)
        recompute_blocks(model)
        return model

    for wrapper in select(is_optimizer=True, overlaps=True):
        options = {"bucket_mb": 4e-4, "pattern": "tree"}
        compare_with_one_process(cluster, wrapper, BRANCHES, (2, 1), "adamw", **options)
    ways: list[dict[str, Any]] = [{"reshard_after_forward": False, "pattern": "ring"}, {}]
    for make, way in zip((deep_gpt, recomputed), ways, strict=True):
        compare_with_one_process(cluster, named("zero3"), DEEP, (1, 2), "adamw", make=make, **way)
    with slow_link.slowed(Link(0.002, 0.0)):
        for wrapper in STAGES:
            compare_with_one_process(cluster, wrapper, SHARED, (2, 1))


@on_ranks(1, 3, 4, timeout=60)
def test_a_step_sends_what_the_formula_says_and_replicas_nothing_before_the_last_microbatch(cluster: Cluster):
    def compare(cluster: Cluster, wrapper: Wrapper, task: Task, num_parts: int, **options: Any) -> None:
        ours = Trained(wrapper, task.make(0), "adamw", **options)
        own, before = mine(cluster, task.batch(cluster.world_size)), LEDGER.total()
        if wrapper.is_replica:
            with no_sync(ours.model):
                task.loss(ours.model, *own).backward()
            assert LEDGER.total() == before, wrapper
        ours.accumulate(task.loss, own, num_parts)
        is_clipped = wrapper.clips and num_parts > 1
        if is_clipped:
            ours.syncing.clip_grad_norm_(1.0)
        ours.optimizer.step()
        reductions = (num_parts,) if wrapper.stage >= 2 else ()
        formula = ours.syncing.traffic(*reductions, **({"is_clipped": is_clipped} if wrapper.clips else {}))
        assert LEDGER.total() - before == formula, (wrapper, options)

    for wrapper in select(takes_any_model=True):
        if not wrapper.by_torch:
            compare(cluster, wrapper, DEEP, 2)
            compare(cluster, wrapper, BRANCHES, 1)
    for wrapper in STAGES:
        compare(cluster, wrapper, DEEP, 2, pattern="tree")
    for wrapper in select(takes_any_model=True, stage=3, overlaps=True):
        half = {"reshard_after_forward": False, "compute_dtype": torch.bfloat16}
        compare(cluster, wrapper, DEEP, 2, **half)


@on_ranks(2)
def test_fused_optimizers_find_gradients_in_the_order_of_their_parameters(cluster: Cluster):
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

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(10, (8,), generator=generator)
    module = cnn()
    expected = trained(module, module, x, y)
    for wrapper in PLAIN:
        module = cnn()
        own = trained(wrapper.make(module), module, x.chunk(2)[cluster.rank], y.chunk(2)[cluster.rank])
        assert_same(own, expected, what=f"parameter of {wrapper}")


@on_ranks(2)
def test_parameters_may_be_in_groups_with_their_own_options_and_a_scheduler(cluster: Cluster):
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

    reference, batch = deep_gpt(0), mine(cluster, text())
    trained(reference, torch.optim.AdamW(groups(reference), **options), None, text())
    for wrapper in select(is_optimizer=True):
        model = deep_gpt(0)
        optimizer = wrapper.make(groups(model), torch.optim.AdamW, **options)
        trained(model, optimizer, optimizer, batch)
        assert_same(model.state_dict(), reference.state_dict(), 1e-8, "parameter")
    model = FullyShardedDataParallel(deep_gpt(0))
    trained(model, torch.optim.AdamW(groups(model), **options), model, batch)
    assert_same(model.full_state_dict(), reference.state_dict(), 1e-8, "parameter")


@on_ranks(2)
def test_after_an_error_in_a_backward_finish_gradient_sync_and_zero_grad_let_training_continue(
    cluster: Cluster,
):
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    batch = examples(cluster.world_size)
    for wrapper in PLAIN:
        ours = Trained(wrapper, BRANCHES.make(cluster.rank))
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
        assert_same({key: change[key] for key in expected}, expected, what=f"gradient of {wrapper}")


def any_task(wrapper: Wrapper) -> Task:
    return heads_task() if wrapper.takes_full_batch else BRANCHES


@for_each(select(by_torch=False))
@on_ranks(2)
def test_a_microbatch_or_a_step_that_is_given_up_leaves_no_trace(cluster: Cluster, wrapper: Wrapper):
    task = any_task(wrapper)
    batch = task.batch(cluster.world_size)
    own = batch if wrapper.takes_full_batch else mine(cluster, batch)
    ours = Trained(wrapper, task.make(0))
    for microbatches, is_complete in ((2, True), (1, False), (2, False)):
        ours.accumulate(
            task.loss,
            [2 * part if part.is_floating_point() else part for part in own],
            microbatches,
            is_complete,
        )
        ours.optimizer.zero_grad()
    ours.accumulate(task.loss, own, 2)
    change = ours.step()
    expected = one_process(task.make(0), lambda model: task.loss(model, *batch))
    assert_same({key: change[key] for key in expected}, expected)


@for_each(select(by_torch=False))
@on_ranks(2)
def test_a_state_that_is_loaded_after_wrapping_is_trained_from_there(cluster: Cluster, wrapper: Wrapper):
    task = any_task(wrapper)
    batch = task.batch(cluster.world_size)
    ours, state = Trained(wrapper, task.make(cluster.rank)), task.make(7).state_dict()
    load = ours.model.load_full_state_dict if wrapper.is_divided else ours.module.load_state_dict
    for _ in range(2):  # the second time when the wrapper has trained
        load(state)
        assert_same(ours.state(), state, 0)
        ours.optimizer.zero_grad()
        ours.accumulate(task.loss, batch if wrapper.takes_full_batch else mine(cluster, batch))
        change = ours.step()
        expected = one_process(task.make(7), lambda model: task.loss(model, *batch))
        assert_same({key: change[key] for key in expected}, expected)


@on_ranks(4)
def test_a_copy_of_a_wrapper_with_a_group_of_its_own_sends_in_the_same_group(cluster: Cluster):
    group = in_pairs(cluster)[0]
    for wrapper in PLAIN:
        assert copy.deepcopy(wrapper.make(nn.Linear(2, 2), group)).group is group


def blocks(wrapper: Wrapper) -> Trained:
    return Trained(wrapper, Blocks())


def backward(ours: Trained) -> Tensor:
    loss = ours.model(torch.ones(2, 8)).sum()
    loss.backward()
    return loss


def finished(wrapper: Wrapper) -> Trained:
    ours = blocks(wrapper)
    backward(ours)
    ours.syncing.finish_gradient_sync()
    return ours


def goes_backward_twice(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    backward(ours)
    backward(ours)


def goes_backward_again_without_a_sync(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    backward(ours)
    ours.model.zero_grad()
    with no_sync(ours.model):
        backward(ours)


def steps_before_it_finishes(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    backward(ours)
    ours.optimizer.step()


def steps_after_no_sync(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    with no_sync(ours.model):
        backward(ours)
    ours.optimizer.step()


def steps_with_a_closure(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    ours.optimizer.step(lambda: backward(ours))


def adds_a_layer(wrapper: Wrapper) -> None:
    ours = finished(wrapper)
    ours.module.blocks.append(nn.Linear(8, 8))
    backward(ours)


def freezes_a_layer(wrapper: Wrapper) -> None:
    ours = finished(wrapper)
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


def goes_backward_after_a_step(wrapper: Wrapper) -> None:
    ours = finished(wrapper)
    loss = ours.model(torch.ones(2, 8)).sum()
    ours.optimizer.step()
    loss.backward()


def keeps_a_graph_of_gradients(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    ours.model(torch.ones(2, 8)).square().sum().backward(create_graph=True)


def goes_backward_with_old_gradients(wrapper: Wrapper) -> None:
    ours = finished(wrapper)
    ours.optimizer.step()
    ours.module.zero_grad()  # not that of the optimizer, or of the wrapper
    backward(ours)


def freezes_shards(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    ours.model.requires_grad_(False)
    backward(ours)


def adds_a_group(wrapper: Wrapper) -> None:
    blocks(wrapper).optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def clips_before_it_finishes(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    backward(ours)
    ours.syncing.clip_grad_norm_(1.0)


def takes_the_norm_of_a_shard(wrapper: Wrapper) -> None:
    [first, *_] = finished(wrapper).optimizer.param_groups[0]["params"]
    first.grad.square().sum()


def watches_shards(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    for shard in ours.model.parameters():
        shard.register_post_accumulate_grad_hook(lambda _: None)
    backward(ours)
    ours.model.finish_gradient_sync()


def compiles_in_place(wrapper: Wrapper) -> None:
    module = Blocks()
    module.compile(backend="eager")
    Trained(wrapper, module)


def compiles_a_block_after_wrapping(wrapper: Wrapper) -> None:
    ours = blocks(wrapper)
    ours.model.module.blocks[1].compile(backend="eager")
    backward(ours)


REFUSED: list[tuple[Callable[[Wrapper], object], Sequence[Wrapper], str]] = [
    (goes_backward_twice, [*OVERLAPPING, named("zero1")], "Another backward"),
    (goes_backward_again_without_a_sync, OVERLAPPING, "Another backward began before finish"),
    (
        steps_before_it_finishes,
        [*PLAIN, *select(takes_any_model=True, stage=3)],
        "^Call finish_gradient_sync",
    ),
    (steps_after_no_sync, [*PLAIN, named("hsdp")], "^Call finish_gradient_sync"),
    (steps_with_a_closure, [*PLAIN, *ZERO3], "without a closure"),
    (steps_with_a_closure, select(is_optimizer=True, overlaps=True), "takes no closure"),
    (adds_a_layer, PLAIN, r"^The parameter blocks.3.weight was added, .* after wrapping"),
    (freezes_a_layer, PLAIN, r"^The parameter blocks.1.weight was added, .* frozen, .* after wrapping"),
    (freezes_a_layer, STAGES, "after wrapping"),
    (lambda wrapper: Trained(wrapper, nn.Embedding(5, 2, sparse=True)), [*PLAIN, *ZERO3], "sparse"),
    (lambda wrapper: Trained(wrapper, Compiled()), PLAIN, r"module\.compile\(\)"),
    (compiles_in_place, ZERO3, "compiled code"),
    (compiles_a_block_after_wrapping, ZERO3, "compiled code"),
    (lambda wrapper: Trained(wrapper, Twice()).model(X).sum().backward(), PLAIN[1:], "use_reentrant=False"),
    (
        goes_backward_after_a_step,
        [*ZERO3, named("zero3_textbook")],
        "stepped between a forward and its backward",
    ),
    (takes_the_norm_of_a_shard, STAGES, "shard only"),
    (
        lambda wrapper: nn.utils.clip_grad_norm_(finished(wrapper).model.parameters(), 1.0),
        ZERO3,
        "shard only",
    ),
    (clips_before_it_finishes, ZERO3, "finish_gradient_sync"),
    (watches_shards, ZERO3, "never run"),
    (
        lambda wrapper: torch.optim.Adafactor(finished(wrapper).model.parameters()).step(),
        ZERO3,
        "element by element",
    ),
    (
        lambda _: ZeroOptimizer(Blocks().parameters(), torch.optim.Adafactor),
        [named("zero1")],
        "element by element",
    ),
    (lambda wrapper: copy.deepcopy(finished(wrapper).model), ZERO3, "full_state_dict"),
    (lambda wrapper: blocks(wrapper).model.state_dict(), ZERO3, "full_state_dict"),
    (lambda wrapper: blocks(wrapper).optimizer.state_dict(), [named("zero1")], "its own shards only"),
    (keeps_a_graph_of_gradients, [*PLAIN, *STAGES], "create_graph=True"),
    (
        goes_backward_with_old_gradients,
        [*select(is_optimizer=True), *select(stage=3, by_torch=False)],
        "does not find shards",
    ),
    (freezes_shards, select(stage=3, by_torch=False), "^A shard was frozen or unfrozen after wrapping"),
    (
        lambda wrapper: blocks(wrapper).module.load_state_dict(Blocks().state_dict()),
        select(stage=3, by_torch=False),
        "load_full_state_dict",
    ),
    (
        lambda wrapper: torch.save(blocks(wrapper).model, io.BytesIO()),
        [*PLAIN, *select(stage=3, by_torch=False)],
        "cannot be saved as a whole",
    ),
    (adds_a_group, [named("zero2")], "all of them at once"),
    (lambda _: FullyShardedDataParallel(nn.BatchNorm1d(3), None, torch.bfloat16), ZERO3, "no buffers"),
]


@on_ranks(2, timeout=60)
def test_what_would_train_wrongly_is_refused_in_a_sentence(cluster: Cluster):
    for use, wrappers, sentence in REFUSED:
        for wrapper in wrappers:
            with pytest.raises(WorkbookError, match=sentence):
                use(wrapper)


@on_ranks(2)
def test_a_refused_step_can_be_taken_after_finish_gradient_sync(cluster: Cluster):
    for wrapper in (*PLAIN, named("hsdp")):
        compared = compare_with_one_process(cluster, wrapper, SHARED, (1,))
        compared.optimizer.zero_grad()
        ours, x = compared.model, mine(cluster, examples(2))[0]
        with no_sync(ours):
            ours(x).sum().backward()
        with pytest.raises(WorkbookError, match="Call finish_gradient_sync"):
            compared.optimizer.step()
        ours.finish_gradient_sync()
        compared.optimizer.step()


@for_each(select(takes_any_model=True, by_torch=False, stage=3))
@on_ranks(2)
def test_a_graph_may_have_several_backwards_and_stage_3_gathers_for_each(cluster: Cluster, wrapper: Wrapper):
    batch = examples(cluster.world_size)
    ours = Trained(wrapper, Layers(cluster.rank))
    loss = odd_loss(ours.model, *mine(cluster, batch))
    for _ in range(2):
        loss.backward(retain_graph=True)
        ours.model.finish_gradient_sync()
    change = ours.step()
    expected = one_process(Layers(0), lambda model: odd_loss(model, *batch))
    assert_same({key: change[key] / 2 for key in expected}, expected)


@on_ranks(3)
def test_a_full_state_goes_into_another_sharded_model(cluster: Cluster):
    state = Layers(3).state_dict()
    for wrapper in select(takes_any_model=True, stage=3):
        model = Trained(wrapper, Layers(cluster.rank)).model
        model.load_full_state_dict(state)
        assert_same(model.full_state_dict(), state, 0)
        with model.gathered() as full:
            assert_same(full.state_dict(), state, 0)
