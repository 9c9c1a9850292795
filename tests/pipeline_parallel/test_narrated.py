"""Each technique of the lesson in one straight line: a toy model, its ranks, and one process beside them."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lab.cluster import Cluster
from lab.trace import timeline
from lab.trace.observer import observe_module
from pipeline_parallel.actions import table_text
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import interleaved_1f1b, one_f_one_b, zb_h1
from pipeline_parallel.stage import balanced_stages
from pipeline_parallel.train_1f1b_by_hand import OneForwardOneBackward
from pipeline_parallel.train_afab import AllForwardAllBackward
from pipeline_parallel.train_model_parallel import ModelParallel
from tests.on_ranks import on_ranks


def noted_step(lesson: OwnStages, x: Tensor, y: Tensor) -> tuple[Tensor | None, list[str]]:
    """Do a step; return its loss and the order of its actions, which the timeline of a script has, too."""
    for stage, describe in lesson.observed():
        observe_module(stage, describe)
    timeline.start_recording()
    loss = lesson.step(x, y)
    done = [event.args for event in timeline.recorded() if "action" in event.args]
    return loss, [f"{args['action']}{args['microbatch']}" for args in done]


def one_process(
    layers: list[nn.Module], examples: int, width: int
) -> tuple[nn.Sequential, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return a model, its batch, and the loss and gradients that one process gets from the full batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(examples, width, dtype=torch.float64), torch.arange(examples) % 3
    loss = cross_entropy(model(x), y)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return model, x, y, loss.detach(), gradients


def assert_close(ours: Tensor | None, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-15)


@on_ranks(3)
def test_model_parallel_equals_one_process(cluster: Cluster):
    # Three layers, for three ranks, and a batch of four examples.
    layers = [nn.Linear(5, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 7)), nn.Linear(7, 3)]
    model, x, y, expected_loss, expected = one_process(layers, examples=4, width=5)
    # Each rank takes one layer as its stage. The batch travels in two microbatches of two examples.
    lesson = ModelParallel(balanced_stages(model, 3), microbatches=2, loss_of=cross_entropy, example=x[:2])

    # The first rank uses x, the last one y. Activations go down the ranks, gradients come back.
    loss = lesson.step(x, y)

    # Only the last rank knows the loss, and every rank has the gradients of its own stage.
    if cluster.rank == 2:
        assert_close(loss, expected_loss)
    else:
        assert loss is None
    for name, parameter in lesson.named_own_parameters().items():
        assert_close(parameter.grad, expected[name])


@on_ranks(4)
def test_gpipe_by_hand_equals_one_process(cluster: Cluster):
    # Four small stages, for four ranks, and a batch of twelve examples.
    layers = [nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 6), nn.Linear(6, 3)]
    model, x, y, expected_loss, expected = one_process(layers, examples=12, width=4)
    # The pipeline takes it in six microbatches of two, all forward and then all backward. While rank 3 is
    # at the first one, ranks 2, 1 and 0 are at the second, third and fourth.
    lesson = AllForwardAllBackward(
        balanced_stages(model, 4), microbatches=6, loss_of=cross_entropy, example=x[:2]
    )
    loss, order = noted_step(lesson, x, y)
    assert order == ["F0", "F1", "F2", "F3", "F4", "F5", "B0", "B1", "B2", "B3", "B4", "B5"]

    # The mean of the microbatches' means is the batch's mean, and the same holds for the gradients.
    if cluster.rank == 3:
        assert_close(loss, expected_loss)
    for name, parameter in lesson.named_own_parameters().items():
        assert_close(parameter.grad, expected[name])


@on_ranks(3)
def test_one_f_one_b_by_hand_equals_one_process(cluster: Cluster):
    # Three small stages, for three ranks, and a batch of eight examples.
    layers = [nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 3)]
    model, x, y, expected_loss, expected = one_process(layers, examples=8, width=5)

    # The order of each rank, with four microbatches. A rank begins with one forward for each rank after it;
    # when it has done its next one, a gradient can have come back.
    rows = ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    lesson = OneForwardOneBackward(
        balanced_stages(model, 3), microbatches=4, loss_of=cross_entropy, example=x[:2]
    )
    loss, order = noted_step(lesson, x, y)
    assert order == rows[cluster.rank].split()

    # A forward makes activations, and the backward of its microbatch frees them: at most 3, 2 and 1 are
    # held at a time, of any number of microbatches.
    held = [sum(1 if action[0] == "F" else -1 for action in order[: i + 1]) for i in range(len(order))]
    assert max(held) == 3 - cluster.rank

    # The order changes nothing in the sums.
    if cluster.rank == 2:
        assert_close(loss, expected_loss)
    for name, parameter in lesson.named_own_parameters().items():
        assert_close(parameter.grad, expected[name])


@on_ranks(3)
def test_one_f_one_b_equals_one_process(cluster: Cluster):
    # Three linear layers for three ranks, and a batch of eight examples.
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)]
    model, x, y, expected_loss, expected = one_process(layers, examples=8, width=5)

    # The pipeline takes it in four microbatches. The schedule is data: what each rank does, in its order.
    # Rank r begins with 2 - r forwards. Then it does one forward and one backward in turn, and at the end
    # the backwards that are left.
    table = one_f_one_b(3, 4)
    assert table_text(table) == (
        "rank 0   F0 F1 F2 B0 F3 B1 B2 B3\nrank 1   F0 F1 B0 F2 B1 F3 B2 B3\nrank 2   F0 B0 F1 B1 F2 B2 F3 B3"
    )
    # Each rank makes the full model and keeps its own stage of it: two modules, two modules, one module.
    pipeline = Pipeline(model, table, cross_entropy, example=x[:2])
    assert list(pipeline.stages) == [str(cluster.rank)]

    # Note when the stage computes a forward, and when the gradient of its result arrives.
    done = []

    def note(stage, inputs, output) -> None:
        done.append("F")
        output.register_hook(lambda gradient: done.append("B"))

    pipeline.stages[str(cluster.rank)].register_forward_hook(note)

    # One step: forward and backward of all microbatches. The last rank knows the loss.
    loss = pipeline.step(x, y)
    if cluster.rank == 2:
        assert_close(loss, expected_loss)

    # The rank did what the table says ...
    assert done == [action.kind for action in table[cluster.rank]]

    # ... so it never held the activations of more than 3 - rank microbatches. GPipe would hold all four.
    held = [done[:i].count("F") - done[:i].count("B") for i in range(len(done) + 1)]
    assert max(held) == 3 - cluster.rank

    # And every parameter of its stage has the gradient of one process.
    own = pipeline.named_own_parameters()
    assert len(own) == 2
    for name, parameter in own.items():
        assert_close(parameter.grad, expected[name])


@on_ranks(2)
def test_interleaved_1f1b_equals_one_process(cluster: Cluster):
    # Four linear layers for two ranks, and a batch of eight examples.
    layers = [nn.Linear(4 + i, 5 + i) for i in range(4)]
    model, x, y, expected_loss, expected = one_process(layers, examples=8, width=4)

    # Each rank has two small stages in place of a large one: rank 0 has stages 0 and 2, rank 1 has 1 and 3.
    # So 2F0 is the forward of microbatch 0 in the second stage of rank 0. A microbatch goes through
    # rank 0, rank 1, rank 0 and rank 1, and its gradient comes back the same way.
    table = interleaved_1f1b(2, 4, chunks=2)
    assert table_text(table) == (
        "rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
        "rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )
    pipeline = Pipeline(model, table, cross_entropy, example=x[:2])
    own = pipeline.named_own_parameters()
    first, second = cluster.rank, cluster.rank + 2
    assert set(own) == {f"{stage}.{kind}" for stage in (first, second) for kind in ("weight", "bias")}

    loss = pipeline.step(x, y)
    if cluster.rank == 1:
        assert_close(loss, expected_loss)
    for name, parameter in own.items():
        assert_close(parameter.grad, expected[name])

    # The price of the smaller bubble: three boundaries between ranks in place of one. Rank 0 sends over
    # the first and the third the activations of four microbatches, and over the second their gradients.
    assert pipeline.traffic().messages_sent == 12


@on_ranks(3)
def test_zero_bubble_equals_one_process(cluster: Cluster):
    # Three linear layers for three ranks, and a batch of eight examples.
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)]
    model, x, y, expected_loss, expected = one_process(layers, examples=8, width=5)

    # A backward has two halves. I is the gradient of the stage's input, and the rank before waits for it.
    # W is the gradient of the stage's weights, and only the optimizer needs it. So a rank can do W later,
    # when it would be idle in 1F1B. Rank r puts W off by r backwards.
    table = zb_h1(3, 4)
    assert table_text(table) == (
        "rank 0   F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3\n"
        "rank 1   F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3\n"
        "rank 2   F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    )
    pipeline = Pipeline(model, table, cross_entropy, example=x[:2])
    own = pipeline.named_own_parameters()

    # Note at each forward whether the weights have a gradient yet.
    has_gradient = []

    def note(stage, inputs) -> None:
        has_gradient.append(all(parameter.grad is not None for parameter in own.values()))

    pipeline.stages[str(cluster.rank)].register_forward_pre_hook(note)

    loss = pipeline.step(x, y)
    if cluster.rank == 2:
        assert_close(loss, expected_loss)

    # On ranks 1 and 2, I0 is done before F2. But the first weight gradient, W0, comes after F2.
    assert has_gradient == [False, False, False, True]

    # Late or not, each weight gradient is there when the step ends, and it is that of one process.
    for name, parameter in own.items():
        assert_close(parameter.grad, expected[name])
