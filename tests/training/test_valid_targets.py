"""The loss is that of one process, also where ranks or microbatches have unequal numbers of valid targets."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel.train_naive import NaiveDataParallel
from expert_parallel.config import MoEConfig
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes as Sizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import IGNORED, loss_of
from lab.ranks import run_ranks
from pipeline_parallel.schedules import table_of
from tests import equivalence, tasks
from tests.expert_parallel import equivalence as experts
from tests.hybrid_parallel import equivalence as hybrid
from tests.on_ranks import on_ranks
from tests.pipeline_parallel import equivalence as pipelines
from tests.refusals import refusal
from tests.wrappers import select
from training.valid_targets import valid_targets
from zero.train_zero3 import FullyShardedDataParallel


def with_prompts(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the batch without the targets of its first third, and with half of those of the second third."""
    x, y = batch[0], batch[1].clone()
    third = len(y) // 3
    y[:third] = IGNORED
    y[third : 2 * third, : y.shape[1] // 2] = IGNORED
    return x, y


@on_ranks(2)
def test_ranks_with_few_targets_count_as_much_as_those_targets(cluster: Cluster):
    # One process trains on 4 examples, of whose targets rank 0 has one valid one, and rank 1 has sixteen.
    tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[:2] = IGNORED
    y[0, -1] = 5
    alone, module = tasks.gpt(0), tasks.gpt(0)
    loss_of(alone(x), y).backward()

    # Each rank divides the sum of its losses by the mean number of valid targets, 8.5.
    model = NaiveDataParallel(module)
    own_x, own_y = x.chunk(2)[cluster.rank], y.chunk(2)[cluster.rank]
    loss_of(model(own_x), own_y, valid_targets(own_y)).backward()
    model.finish_gradient_sync()
    assert_same(equivalence.mean_gradients(module), equivalence.mean_gradients(alone))


@on_ranks(2)
def test_a_mean_over_one_ranks_valid_targets_is_refused(cluster: Cluster):
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(cluster.rank))
    targets = tokens[:, 1:].clone()
    targets[0, : cluster.rank + 1] = IGNORED
    for model in (
        NaiveDataParallel(tasks.gpt(0)),
        FullyShardedDataParallel(tasks.gpt(0)),
    ):
        with pytest.raises(WorkbookError, match=r"valid_targets\(targets\)"):
            loss_of(model(tokens[:, :-1]), targets)
    loss_of(tasks.gpt(0)(tokens[:, :-1]), targets)  # of one process alone


@on_ranks(1)
def test_microbatches_with_few_targets_count_as_much_as_those_targets(cluster: Cluster):
    # Of the two microbatches, the first one has one valid target, and the second one has all of them.
    x, y = pipelines.text(4)
    y = y.clone()
    y[:2] = IGNORED
    y[0, -1] = 5
    table = table_of("1f1b", 1, 2)
    pipelines.compare_with_one_process(cluster, pipelines.gpt, table, (x, y))


@on_ranks(3)
def test_gradients_of_data_parallelism_are_those_of_one_process(cluster: Cluster):
    x, y = with_prompts(tasks.text())
    own = equivalence.mine(cluster, (x, y))
    expected = equivalence.one_process(tasks.gpt(0), lambda model: loss_of(model(x), y))
    number, parts = valid_targets(own[1]), 3

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model(x), y, number) * parts  # `accumulate` divides it by their number

    for wrapper in select(takes_any_model=True):
        ours = equivalence.Trained(wrapper, tasks.gpt(cluster.rank))
        ours.accumulate(loss, own, parts)
        change = ours.step()
        assert_same({key: change[key] for key in expected}, expected, what=f"gradient, {wrapper},")


@on_ranks(2)
def test_weights_of_classes_are_added_up_in_place_of_targets(cluster: Cluster):
    x, y = with_prompts(tasks.text())
    own, parts = equivalence.mine(cluster, (x, y)), 3
    weight = torch.linspace(0.1, 5, tasks.gpt(0).config.vocab_size, dtype=torch.float64)
    whole = nn.CrossEntropyLoss(weight)
    expected = equivalence.one_process(tasks.gpt(0), lambda model: whole(model(x).flatten(0, 1), y.flatten()))
    number = valid_targets(own[1], weight=weight)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), weight, reduction="sum")
        return total / number * parts  # `accumulate` divides it by their number

    for wrapper in select(takes_any_model=True, by_torch=False):
        ours = equivalence.Trained(wrapper, tasks.gpt(cluster.rank))
        ours.accumulate(loss, own, parts)
        change = ours.step()
        assert_same({key: change[key] for key in expected}, expected, what=f"gradient, {wrapper},")


@on_ranks(2)
def test_gradients_of_pipelines_are_those_of_one_process(cluster: Cluster):
    for name in ("1f1b", "zb_v", "dualpipe_v"):  # the last rank has the loss, or the first one, or both
        pipelines.compare_schedule(
            cluster, name, 4, lambda: pipelines.gpt(num_layers=6),
            lambda rows: with_prompts(pipelines.text(rows)),
        )  # fmt: skip
    for by_hand in pipelines.BY_HAND.values():
        pipelines.compare_schedule(
            cluster, "gpipe", 4, pipelines.gpt, lambda rows: with_prompts(pipelines.text(rows)),
            by_hand=by_hand,
        )  # fmt: skip


@on_ranks(3)
def test_gradients_of_sequences_that_are_cut_are_those_of_one_process(cluster: Cluster):
    for wrapper in select(lesson="context_parallel"):
        equivalence.compare_with_one_process(cluster, wrapper, tasks.heads_task(17, ignored=7), (1, 1))


@on_ranks(2)
def test_gradients_of_experts_are_those_of_one_process(cluster: Cluster):
    experts.compare_with_one_process(cluster, MoEConfig(4, 2), balance="aux", ignored=5)


@pytest.mark.parametrize(
    "every",
    [
        [Sizes(data=2, microbatches=2), Sizes(tensor=2)],
        [Sizes(data=2, pipeline=2, microbatches=2), Sizes(data=2, context=2, zero=2)],
    ],
)
def test_gradients_of_a_mesh_are_those_of_one_process(every: list[Sizes]):
    def work(cluster: Cluster) -> None:
        for sizes in every:
            # Of each row in the first half of the batch; on two ranks a microbatch has no target at all.
            hybrid.compare(cluster, sizes, ignored=hybrid.TIME if cluster.world_size == 2 else 7)
        if cluster.world_size == 2:
            hybrid.compare(cluster, Sizes(data=2), Experts(MoEConfig(4, 2), aux_weight=0.3), ignored=7)

    run_ranks(work, every[0].world_size)


@on_ranks(2)
def test_a_step_without_a_valid_target_is_refused_on_all_ranks(cluster: Cluster):
    sentence = refusal(valid_targets, torch.full((4,), IGNORED))
    assert sentence == "All targets of this step are -100: there is nothing to train on."


@on_ranks(2)
def test_a_mesh_refuses_ignored_targets_whose_number_is_not_given(cluster: Cluster):
    x, y = hybrid.batch(4, ignored=7)
    model = put_on_mesh(hybrid.gpt(), Mesh(cluster, Sizes(data=2)), x[:2], torch.optim.SGD, lr=0.1)
    with pytest.raises(WorkbookError, match=r"backward\(x, y, valid_targets\(y, mesh.data\)\)"):
        model.backward(x[:2], y[:2])
