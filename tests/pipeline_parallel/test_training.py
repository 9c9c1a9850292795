"""Every pipeline trains as one process: by a table, by hand, and by PyTorch's schedules.

Each call of compare_schedule compares the loss, all gradients, the parameters after the steps, and what is
sent with the formula.
"""

import gc
import math
import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from comm.point_to_point import isend
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP, loss_of
from lab.models.parts import parts_of
from lab.ranks import forked, run_ranks
from lab.trace.memory import saved_activations
from pipeline_parallel.actions import placement
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import SCHEDULES, one_f_one_b, stages_per_rank, table_of
from pipeline_parallel.stage import Stage, balanced_stages
from pipeline_parallel.train_torch_pipelining import TORCH_SCHEDULES, TorchPipeline
from tests.equivalence import mean_gradients
from tests.on_ranks import on_ranks
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
    BY_HAND,
    RTOL,
    cnn,
    compare_schedule,
    compare_with_one_process,
    gpt,
    gradients_of,
    images,
    mlp,
    only,
    own_gradients,
    text,
    vectors,
)
from tests.pipeline_parallel.rows import parse_row
from tests.refusals import refusal, the_one_sentence
from training.evaluation import evaluating

forked.preload("pipeline_parallel.train_torch_pipelining")

# The schedule of each pipeline, its chunks, and the lesson by hand, if any, or TorchPipeline.
PIPELINES: dict[str, tuple[str, int, type[OwnStages] | None]] = {
    **{name if chunks == 2 else f"{name} in three": (name, chunks, None) for name, chunks in ALL_SCHEDULES},
    **{f"{name} by hand": (name, 2, lesson) for name, lesson in BY_HAND.items()},
    **{f"{name} of torch": (name, 2, TorchPipeline) for name in TORCH_SCHEDULES},
}


def tied_sequential() -> nn.Module:
    """Make a language model of plain modules whose embedding is its last layer's weight, too."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        *(nn.LayerNorm(8), nn.Linear(8, 13, bias=False)),
    )
    model[7].weight = model[0].weight
    return model.double()


def transposed() -> nn.Module:
    """Make a CNN that keeps channels last in memory: what its stages send is not contiguous."""
    return cnn().to(memory_format=torch.channels_last)


def frozen(*names: str) -> nn.Module:
    model = gpt(num_layers=2)
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


# The last freezes the first of two stages.
FROZEN = (("head",), ("blocks.1.mlp",), ("token_embedding", "position_embedding", "blocks.0"))


@pytest.mark.parametrize("name", PIPELINES)
@on_ranks(2, timeout=60)
def test_two_ranks_train_with_microbatches_as_one_process(cluster: Cluster, name: str):
    schedule, chunks, lesson = PIPELINES[name]
    stages = 2 * stages_per_rank(schedule, chunks)

    def compare(microbatches: int, make: Any, batch_of: Any, steps: int = 1) -> None:
        if lesson is TorchPipeline:
            microbatches = 4  # else some of torch's refuse
        how = {"chunks": chunks, "steps": steps, "by_hand": lesson}
        compare_schedule(cluster, schedule, microbatches, make, batch_of, **how)

    # All boundaries have one size, so a message would also fit where another one is expected.
    compare(3, lambda: MLP([6] * (stages + 1)).double(), partial(vectors, width=6))
    compare(3, partial(mlp, stages), vectors, steps=2)
    for microbatches in (1, 5):
        compare(microbatches, partial(mlp, stages), vectors)
    compare(3, partial(gpt, num_layers=max(2, stages - 2)), text, steps=2)  # tied weights
    if stages <= 4:
        for names in FROZEN:
            compare(2, partial(frozen, *names), text)
        compare(2, cnn if lesson is TorchPipeline else transposed, images)
        compare(2, tied_sequential, text)


class Detached(nn.Linear):
    """Lets no gradient through, or none of every other microbatch; if `frozen`, also none to its weights."""

    def __init__(self, is_always: bool, frozen: bool) -> None:
        super().__init__(6, 6)
        self.is_always, self.frozen, self.calls = is_always, frozen, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.is_always and self.calls % 2:
            return super().forward(x)
        with torch.set_grad_enabled(not self.frozen):
            return super().forward(x.detach())


@pytest.mark.parametrize("name", [name for name, (*_, by) in PIPELINES.items() if by is not TorchPipeline])
@on_ranks(3, timeout=60, group_timeout=5)
def test_a_stage_through_which_no_gradient_flows_gives_zeros(cluster: Cluster, name: str):
    schedule, chunks, lesson = PIPELINES[name]
    table, (x, y) = table_of(schedule, 3, 4, chunks), vectors(8, width=6)
    stages = len(placement(table))

    def make(at: int, how: tuple[bool, bool]) -> nn.Module:
        torch.manual_seed(0)
        layers = (Detached(*how) if i == at else nn.Linear(6, 6) for i in range(stages))
        return nn.Sequential(*layers).double()

    for at in (0, stages // 2, stages - 1):
        for how in ((True, False), (True, True), (False, False), (False, True)):
            model = make(at, how)
            for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
                if (loss := loss_of(model(part), target)).requires_grad:
                    (loss / 4).backward()
            if lesson is None:
                pipeline: Any = Pipeline(make(at, how), table, loss_of, x[:2])
            else:
                pipeline = lesson(balanced_stages(make(at, how), stages), 4, loss_of, x[:2])
            pipeline.step(x, y)
            pipeline.finish_gradient_sync()
            expected, found = mean_gradients(model), own_gradients(pipeline)
            assert_same(found, only(expected, found), RTOL, f"gradient, {name}, {how} in stage {at},")


@pytest.mark.parametrize("n", [1, 3, 4])
@on_ranks("n", timeout=120)
def test_any_number_of_ranks_trains_as_one_process(cluster: Cluster, n: int):
    """On three ranks stages are recomputed, and on four there are also fewer microbatches than ranks."""
    for schedule, chunks, lesson in PIPELINES.values():
        if lesson is TorchPipeline:
            continue
        stages = n * stages_per_rank(schedule, chunks)
        how = {"recompute": n == 3, "chunks": chunks, "steps": 1, "by_hand": lesson}
        make = partial(gpt, num_layers=max(2, stages - 2), tied=n != 3)
        compare_schedule(cluster, schedule, n + 1, make, text, **how)
        if n == 4 and stages == 4:
            compare_schedule(cluster, schedule, 2, make, text, **how)


@on_ranks(2, timeout=20)
def test_full_backwards_may_stand_beside_split_ones(cluster: Cluster):
    """So trains any valid table: microbatches in another order on each rank, and stages placed at will."""
    for table in (
        [parse_row("F0 F1 B1 B0", 0), parse_row("F0 F1 I1 W1 I0 W0", 1)],
        [parse_row("F0 F1 B1 B0", 0), parse_row("F1 F0 B0 B1", 1)],
        [parse_row("0F0 1F0 0F1 1F1 1I0 0B0 1I1 1W0 0B1 1W1"), parse_row("2F0 2B0 2F1 2B1")],
    ):
        compare_with_one_process(cluster, lambda: mlp(4), table, vectors(4))


@on_ranks(2, timeout=20)
def test_tied_copies_are_equal_before_the_first_step(cluster: Cluster):
    model, (x, _) = gpt(num_layers=2), text(2)
    if cluster.rank == 1:
        model.head.weight.data.normal_()
    pipeline = Pipeline(model, table_of("1f1b", 2, 2), loss_of, x[:1])
    initial = {name: each.detach() for name, each in pipeline.named_own_parameters().items()}
    expected = {name: each for name, each in gpt(num_layers=2).state_dict().items() if name in initial}
    assert_same(initial, expected, 0, "initial parameter,")


@on_ranks(3, 2, timeout=20, group_timeout=2)
def test_tied_gradients_are_exchanged_whether_the_number_of_ranks_is_odd_or_even(cluster: Cluster):
    compare_schedule(cluster, "1f1b", 1, partial(gpt, num_layers=2), text, steps=1)


@on_ranks(2, timeout=20)
def test_recomputation_drops_out_the_same(cluster: Cluster):
    x, y = text(2)
    gradients = []
    for recompute in (False, True):
        model = gpt(num_layers=2, dropout=0.5)
        pipeline = Pipeline(model, table_of("gpipe", 2, 2), loss_of, x[:1], recompute=recompute)
        torch.manual_seed(cluster.rank)
        pipeline.step(x, y)
        gradients.append(own_gradients(pipeline))
    assert_same(gradients[1], gradients[0], RTOL)


class CheckpointedBlock(nn.Module):
    """Computes two layers again in the backward, by itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


def checkpointed(use_reentrant: bool) -> nn.Module:
    torch.manual_seed(0)
    blocks = (CheckpointedBlock(use_reentrant) for _ in range(3))
    return nn.Sequential(nn.Linear(5, 5), *blocks, nn.Linear(5, 6)).double()


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2, timeout=60)
def test_blocks_that_checkpoint_themselves_train_in_every_schedule(cluster: Cluster, use_reentrant: bool):
    for name in SCHEDULES:
        for recompute in (False, True):
            compare_schedule(
                cluster, name, 3, partial(checkpointed, use_reentrant), vectors, recompute=recompute
            )


def normalised() -> nn.Module:
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(5), nn.BatchNorm1d(5, momentum=None), nn.BatchNorm1d(5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), norm) for norm in norms), nn.Linear(5, 6)).double()


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2, timeout=60)
def test_batch_norm_counts_each_microbatch_once(cluster: Cluster, recompute: bool):
    (x, y), model = vectors(6), normalised()
    for part in x.chunk(3):
        model(part)
    for name in SCHEDULES:
        pipeline = Pipeline(normalised(), table_of(name, 2, 3), loss_of, x[:2], recompute=recompute)
        assert_same(pipeline.full_state_dict(), normalised().state_dict(), 0, "before the first step:")
        pipeline.step(x, y)
        assert_same(pipeline.full_state_dict(), model.state_dict(), what=f"{name}: state")


@on_ranks(2, timeout=20)
def test_1f1b_holds_no_more_microbatches_than_ranks_come_after(cluster: Cluster):
    x, y = vectors(6)
    peaks = []
    for m in (1, 6):  # one microbatch alone, and six of the same size
        pipeline = Pipeline(mlp(2), table_of("1f1b", 2, m), loss_of, x[:1])
        with saved_activations(lambda: [x, y, *pipeline.parameters()]) as watch:
            pipeline.step(x[:m], y[:m])
        peaks.append(watch.peak_bytes)
    held, most = peaks[1] / peaks[0], 2 - cluster.rank
    assert held == most, f"rank {cluster.rank} held {held:.2f} microbatches, and not {most}"


def most_on_their_way(cluster: Cluster, name: str, microbatches: int, by_hand: type[OwnStages] | None) -> int:
    """Return how many tensors that the rank has sent are in memory at most, in a step."""
    x, y = vectors(microbatches)
    sent: list[StorageWeakRef] = []
    most = 0

    def counted(tensor: Tensor, *where: Any) -> Any:
        nonlocal most
        sent.append(StorageWeakRef(tensor.untyped_storage()))
        most = max(most, sum(not one.expired() for one in sent))
        return isend(tensor, *where)

    if by_hand is None:
        pipeline: Any = Pipeline(mlp(4), table_of(name, cluster.world_size, microbatches), loss_of, x[:1])
    else:
        pipeline = by_hand(balanced_stages(mlp(4), cluster.world_size), microbatches, loss_of, x[:1])
    with mock.patch.object(sys.modules[type(pipeline).step.__module__], "isend", counted, create=True):
        with mock.patch("pipeline_parallel.train_afab.isend", counted):
            pipeline.step(x, y)
    return most


@pytest.mark.parametrize("n", [2, 3])
@on_ranks("n", timeout=30)
def test_a_tensor_that_was_sent_is_kept_until_it_has_arrived_and_not_until_the_end_of_the_step(
    cluster: Cluster, n: int
):
    for name, by_hand in (("1f1b", None), ("1f1b", BY_HAND["1f1b"]), ("zb_h1", None)):
        kept = [most_on_their_way(cluster, name, m, by_hand) for m in (8, 24)]
        assert kept[0] == kept[1], (
            f"rank {cluster.rank}, {name}: {kept[0]}, and with more microbatches {kept[1]}"
        )


@on_ranks(2, timeout=20)
def test_when_weight_gradients_are_computed_nothing_they_needed_is_left(cluster: Cluster):
    """Not even with the garbage collector off: a cycle would keep memory until it runs."""
    x, y = vectors(6)
    for name in ("zb_h1", "1f1b", "interleaved"):
        for recompute in (False, True):
            pipeline = Pipeline(mlp(4), table_of(name, 2, 3), loss_of, x[:2], recompute=recompute)
            saved: list[StorageWeakRef] = []
            own = {StorageWeakRef(t.untyped_storage()) for t in [x, y, *pipeline.parameters()]}

            def note(tensor: Tensor, saved: list[StorageWeakRef] = saved) -> Tensor:
                saved.append(StorageWeakRef(tensor.untyped_storage()))
                return tensor.detach()

            gc.disable()
            try:
                with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                    pipeline.step(x, y)
                held = [one for one in saved if one not in own and not one.expired()]
                assert saved and not held, f"{name}: {len(held)} tensors are still held"
            finally:
                gc.enable()


@on_ranks(2, timeout=20)
def test_the_norm_is_that_of_all_stages(cluster: Cluster):
    x, y = text(4)
    for norm_type in (2.0, 1.0, math.inf):
        model = gpt(num_layers=2)
        loss_of(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        pipeline = Pipeline(gpt(num_layers=2), table_of("1f1b", 2, 2), loss_of, x[:2])
        pipeline.step(x, y)
        pipeline.finish_gradient_sync()
        torch.testing.assert_close(
            pipeline.clip_grad_norm_(0.01, norm_type), norm.double(), rtol=RTOL, atol=0
        )
        expected, found = gradients_of(model), own_gradients(pipeline)
        assert_same(found, only(expected, found), RTOL, "clipped gradient,")


@on_ranks(2, timeout=20)
def test_training_goes_on_with_dropout_after_an_evaluation(cluster: Cluster):
    x, _ = text(4)
    pipeline = Pipeline(gpt(num_layers=2, dropout=0.5), table_of("1f1b", 2, 2), loss_of, x[:2])
    with evaluating(pipeline):
        pipeline.forward_only(x)
    assert all(module.training for module in pipeline.modules()), "not in training mode again"


@on_ranks(3)
def test_however_the_model_is_cut_it_is_trained_the_same(cluster: Cluster):
    table = one_f_one_b(3, 2)
    for balance in ("layers", "parameters"):
        compare_with_one_process(cluster, partial(gpt, num_layers=4), table, text(4), balance=balance)


@pytest.mark.parametrize("name", ["1f1b", *(f"{name} by hand" for name in BY_HAND)])
@on_ranks(2)
def test_gradients_of_several_steps_add_up_until_they_are_cleared(cluster: Cluster, name: str):
    schedule, _, lesson = PIPELINES[name]
    (x, y), model = text(4), gpt(num_layers=2)
    if lesson is None:
        pipeline: Any = Pipeline(model, table_of(schedule, 2, 2), loss_of, x[:2])
    else:
        pipeline = lesson(balanced_stages(model, 2), 2, loss_of, x[:2])
    pipeline.step(x, y)
    pipeline.finish_gradient_sync()
    once = own_gradients(pipeline)
    pipeline.zero_grad()
    for _ in range(2):
        pipeline.step(x, y)
    pipeline.finish_gradient_sync()
    assert_same(own_gradients(pipeline), {name: 2 * each for name, each in once.items()}, RTOL)

    with pytest.raises(WorkbookError, match=r"call zero_grad\(\) first"):
        pipeline.step(x, y)  # tied gradients have been added up
    pipeline.zero_grad()
    pipeline.step(x, y)


@on_ranks(2)
def test_a_tied_weight_with_permuted_strides_trains_as_on_one_process(cluster: Cluster):
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        first, middle, last = (nn.Linear(4, 4, bias=False).double() for _ in range(3))
        first.weight = last.weight = nn.Parameter(first.weight.detach().t())
        assert not first.weight.is_contiguous()
        return nn.Sequential(first, middle, last)

    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = make()
    nn.functional.mse_loss(model(x), y).backward()
    pipeline = Pipeline(make(), one_f_one_b(2, 2), nn.functional.mse_loss, x[:2])
    pipeline.step(x, y)
    pipeline.finish_gradient_sync()
    expected = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in pipeline.named_own_parameters().items():
        assert_same({name: parameter.grad}, {name: expected[name].grad})


@on_ranks(3)
def test_evaluation_is_that_of_one_process_for_every_schedule_and_leaves_all_as_it_was(cluster: Cluster):
    n = cluster.world_size
    for name in SCHEDULES:
        make = partial(gpt, num_layers=max(3, n * stages_per_rank(name)), dropout=0.4)
        (x, y), model = text(5), make()  # five rows: microbatches of two, two and one
        pipeline = Pipeline(make(), table_of(name, n, 3), loss_of, x[:2])
        pipeline.stages[next(iter(pipeline.stages))].eval()
        modes = [module.training for module in pipeline.modules()]
        state = torch.random.get_rng_state()
        with evaluating(pipeline):
            outputs = pipeline.forward_only(x)
            sums = pipeline.evaluation_sums(x, y, torch.tensor([True, False, True, True, False]))
        assert [module.training for module in pipeline.modules()] == modes
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        assert (outputs is None) == (sums is None) == (pipeline.rank_of[pipeline.last] != pipeline.rank)
        if outputs is not None:
            expected = model.eval()(x)
            torch.testing.assert_close(outputs, expected.detach(), rtol=1e-9, atol=1e-12)
            kept = [0, 2, 3]
            loss = loss_of(expected[kept].float(), y[kept]) * y[kept].numel()
            torch.testing.assert_close(sums[0], loss.double().detach(), rtol=1e-5, atol=0)


@on_ranks(2)
def test_the_full_state_goes_from_one_schedule_to_another_and_to_one_process(cluster: Cluster):
    x, _ = text(2)
    model = gpt(num_layers=6)
    first = Pipeline(model, table_of("zb_v", 2, 2), loss_of, x[:1])
    state = first.full_state_dict()
    assert_same(state, model.state_dict(), 0)
    other = gpt(num_layers=6)
    for parameter in other.parameters():
        parameter.data.zero_()
    second = Pipeline(other, table_of("interleaved", 2, 2), loss_of, x[:1])
    second.load_full_state_dict(state)
    assert_same(second.full_state_dict(), model.state_dict(), 0)
    optimizer = torch.optim.AdamW(second.parameters())
    names = {shard.name for shard in second.state_shards(optimizer)}
    assert "model/head.weight" not in names  # the tied weight goes by its first name, on both ranks
    assert "model/token_embedding.weight" in names


def test_what_does_not_fit_is_refused_in_a_sentence_on_all_ranks():
    def shared_by_three() -> nn.Module:
        model = MLP([4, 4, 4, 4])
        model.layers[1].weight = model.layers[2].weight = model.layers[0].weight
        return model

    def work(cluster: Cluster) -> list[str]:
        x, y = vectors(4)
        model, table = mlp(5), one_f_one_b(3, 2)
        pipeline = Pipeline(model, table, loss_of, x[:2])
        calls = [
            lambda: Pipeline(model, one_f_one_b(2, 2), loss_of, x),
            lambda: Pipeline(mlp(2), table, loss_of, x),
            lambda: Pipeline(nn.Linear(2, 2), table, loss_of, x),
            lambda: Pipeline(shared_by_three(), table, loss_of, torch.zeros(2, 4)),
            lambda: pipeline.step(x[:3], y[:3]),
        ]
        return [refusal(call) for call in calls]

    first, *others = run_ranks(work, 3)
    assert all(other == first for other in others)
    starts = (
        "The schedule is for 2 ranks, and there are 3.",
        "2 parts cannot be cut into 3 stages: take fewer ranks or --chunks, or more --layers.",
        "A Linear cannot be cut into stages: give an nn.Sequential",
        "Stages of three ranks share a parameter",
        "The pipeline was made for x and y of 4 rows, in 2 microbatches, and got 3 and 3",
    )
    for sentence, start in zip(first, starts, strict=True):
        assert sentence.startswith(start), sentence


class Drop(nn.Linear):
    """Drops rows, and so has an output whose shape depends on numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > 0])


class Sign(nn.Linear):
    """Returns whole numbers, which have no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sign().long()


def test_a_stage_that_cannot_be_trained_is_refused_in_a_sentence_on_all_ranks():
    """Else one rank would fail in its first forward or backward, and the others would lose it."""
    changed = "its first layers change it in place, so leave inplace=True out there."
    floats = "on an input of shape (2, 5) and torch.float32: "

    def work(cluster: Cluster, *made: Any) -> str:
        stages, table = [make() for make in made], table_of("1f1b", 2, 2)
        return refusal(Pipeline, stages, table, loss_of, torch.ones(2, 5), recompute=True)

    for first, second, sentence in (
        (nn.Linear, lambda *_: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 5)), floats + changed),
        (nn.Linear, lambda *_: nn.Sequential(nn.Flatten(0), nn.Dropout(inplace=True)), floats + changed),
        (lambda *_: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 5)), nn.Linear, floats + changed),
        (nn.Linear, lambda *_: nn.Linear(4, 5), floats + "a and b must have same reduction dim"),
        (Sign, nn.Linear, "can require gradients."),
        (Drop, nn.Linear, floats + "it asks for numbers, but shapes must be known before there are any."),
    ):
        text = the_one_sentence(run_ranks(work, 2, partial(first, 5, 5), partial(second, 5, 5)))
        assert text.startswith("Stage ") and sentence in text, text


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "gpipe by hand", "1f1b of torch"])
def test_examples_of_another_shape_are_refused_in_a_sentence_on_all_ranks(name: str):
    schedule, _, lesson = PIPELINES[name]

    def work(cluster: Cluster) -> list[str]:
        table, (x, y) = table_of(schedule, 2, 4), text(8)
        stages, longer = placement(table), torch.cat([x, x], 1)
        if lesson is None:
            pipeline: Any = Pipeline(gpt(block_size=2 * x.shape[1]), table, loss_of, x[:2])
        elif lesson is TorchPipeline:
            pipeline = TorchPipeline(balanced_stages(gpt(), len(stages)), schedule, 4, x[:2], stages)
        else:
            pipeline = lesson(balanced_stages(gpt(), len(stages)), 4, loss_of, x[:2])
        pipeline.step(x, y)
        calls = [
            lambda: pipeline.step(longer, torch.cat([y, y], 1)),
            lambda: pipeline.step(x[:, 1:], y[:, 1:]),
            lambda: pipeline.forward_only(longer),
            lambda: pipeline.forward_only(x[:1, 1:]),
        ]
        return [refusal(call) for call in calls]

    sentences = zip(*run_ranks(work, 2), strict=True)
    for shape, each in zip(("(8, 10)", "(8, 4)", "(8, 10)", "(1, 4)"), sentences, strict=True):
        assert f"was made for microbatches of shape (2, 5), and got an x of shape {shape}: " in (
            the_one_sentence(each)
        )


class TimeFirst(nn.Module):
    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd.transpose(0, 1)


@on_ranks(2, timeout=20)
def test_a_loss_of_outputs_whose_first_dimension_is_time_is_not_refused(cluster: Cluster):
    torch.manual_seed(0)
    (x, y), model = text(8), nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 13), TimeFirst()).double()

    def loss_of_batch(outputs: Tensor, y: Tensor) -> Tensor:
        return loss_of(outputs.transpose(0, 1), y)

    loss = Pipeline(model, one_f_one_b(2, 4), loss_of_batch, x[:2]).step(x, y)
    wanted = loss_of_batch(model(x), y).detach() if cluster.rank == 1 else None
    assert_same({"loss": loss}, {"loss": wanted}, RTOL)


def test_a_stage_may_return_other_rows_than_it_takes_and_is_evaluated_with_whole_microbatches():
    def work(cluster: Cluster) -> str:
        x, y = (torch.cat([part.unsqueeze(1)] * 3, 1) for part in vectors(8))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Flatten(0, 1), nn.Linear(6, 6)).double()
        pipeline = Pipeline(model, one_f_one_b(2, 4), lambda out, y: loss_of(out, y.flatten()), x[:2])
        pipeline.step(x, y)
        outputs = pipeline.forward_only(x)
        assert outputs is None if cluster.rank == 0 else torch.equal(outputs, model(x))
        return refusal(pipeline.forward_only, x[:7])

    assert the_one_sentence(run_ranks(work, 2)) == (
        "A stage returns other rows than it takes, so evaluate microbatches of 2 rows: x has 7, and 4 "
        "microbatches have 8."
    )


WEIGHTS = torch.tensor([9.0, 1.0, 1.0, 0.1, 1.0, 5.0]).double()


def weighted(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the weighted sum by the number of targets, which the pipeline makes a mean over the weights."""
    return cross_entropy(outputs, y, WEIGHTS, reduction="sum") / len(y)


def contrasted(outputs: Tensor, y: Tensor) -> Tensor:
    """Compare each example with all others."""
    return cross_entropy(outputs @ outputs.t(), torch.arange(len(outputs)))


class OverOnes(nn.Module):
    """Takes probabilities, and the mean over the targets that are one."""

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(outputs, y, y, reduction="sum") / y.sum()


class Counted(nn.CrossEntropyLoss):
    """Counts its calls, and draws random numbers."""

    calls = 0

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(nn.functional.dropout(outputs), y)


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "gpipe by hand"])
def test_a_loss_that_is_no_mean_over_valid_targets_is_refused_in_a_sentence_on_all_ranks(name: str):
    schedule, _, lesson = PIPELINES[name]

    def work(cluster: Cluster, loss_of: Any) -> str:
        table, (x, y), model = table_of(schedule, 2, 4), vectors(8), [*mlp(4).layers, nn.Sigmoid()]
        y = (torch.arange(6) < y[:, None]).double() if isinstance(loss_of, OverOnes) else y
        if lesson is None:
            pipeline: Any = Pipeline(model, table, loss_of, x[:2])
        else:
            stages = balanced_stages(nn.Sequential(*model), len(placement(table)))
            pipeline = lesson(stages, 4, loss_of, x[:2])
        return refusal(pipeline.step, x, y)

    per_ignored = nn.CrossEntropyLoss(ignore_index=0)
    total = nn.CrossEntropyLoss(reduction="sum")
    for loss in (nn.CrossEntropyLoss(WEIGHTS), per_ignored, total, contrasted, OverOnes()):
        sentence = the_one_sentence(run_ranks(work, 2, loss))
        assert sentence.startswith("The loss is no mean over valid targets: with random outputs it is ")


@on_ranks(2, timeout=20)
def test_a_mean_over_weights_is_that_of_one_process(cluster: Cluster):
    """As the refusal says. Without the number of targets the loss is a mean over targets."""
    x, y = vectors(8)
    for loss_of_all, num_targets in ((nn.CrossEntropyLoss(WEIGHTS), WEIGHTS[y].sum()), (weighted, None)):
        model = mlp(2)
        loss = loss_of_all(model(x), y)
        loss.backward()
        pipeline = Pipeline(mlp(2), table_of("zb_h1", 2, 4), weighted, x[:2])
        found = pipeline.step(x, y, num_targets)
        wanted = loss.detach() if cluster.rank == 1 else None
        assert_same({"loss": found}, {"loss": wanted}, RTOL, "result")
        assert_same(own_gradients(pipeline), only(gradients_of(model), own_gradients(pipeline)), RTOL)


@on_ranks(2, timeout=20)
def test_a_loss_is_tried_in_the_first_step_and_that_changes_nothing(cluster: Cluster):
    """Not even a loss that counts its calls, draws random numbers and has weights of its own."""
    (x, y), loss_of = vectors(8), Counted(torch.ones(6).double())
    pipeline = Pipeline(mlp(2), table_of("1f1b", 2, 4), loss_of, x[:2])
    state = torch.get_rng_state()
    pipeline.begin_step(x, y)
    assert torch.equal(torch.get_rng_state(), state) and loss_of.calls == 0
    pipeline.step(x, y)
    assert loss_of.calls == (4 if cluster.rank == 1 else 0)
    assert pipeline.full_state_dict().keys() == mlp(2).state_dict().keys()


def test_a_rank_without_parameters_is_refused_on_all_ranks():
    def work(cluster: Cluster) -> str:
        model = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
        stages = [Stage(nn.Sequential(*model), [part]) for part in parts_of(nn.Sequential(*model))]
        return refusal(OwnStages, stages, 2, nn.functional.mse_loss, torch.ones(2, 4))

    assert set(run_ranks(work, 3)) == {"Rank 1 would have no parameters to train: cut fewer stages."}


@on_ranks(3)
def test_what_is_not_for_pytorchs_schedules_is_refused_in_one_sentence(cluster: Cluster):
    for name, microbatches, sentence in (
        ("1f1b", 2, r"PyTorch's 1f1b refuses: Number of microbatches \(2\) must be greater"),
        ("interleaved", 7, "of the number of rounds"),
        ("dualpipe_v", 5, "at least as many microbatches as stages"),
    ):
        (x, _), rank_of = text(microbatches), placement(table_of(name, 3, microbatches))
        stages = balanced_stages(gpt(num_layers=6), len(rank_of))
        with pytest.raises(WorkbookError, match=sentence) as refused:
            TorchPipeline(stages, name, microbatches, x[:1], rank_of)
        assert "\n" not in str(refused.value)
