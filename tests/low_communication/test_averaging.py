"""Test wrappers whose ranks train alone for some steps: local SGD, and DiLoCo, plain and streaming.

Their ranks equal workers in one process, whose outer optimizer is torch's SGD, in each step.
"""

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.trace.ledger import LEDGER, Traffic
from low_communication.train_diloco import StreamingDiLoCo, divide_in_order
from low_communication.train_diloco_plain import DiLoCo
from low_communication.train_local_sgd import LocalSGD
from tests.equivalence import in_pairs
from tests.low_communication.equivalence import (
    Optimizers,
    OuterSteps,
    Task,
    Workers,
    adamw,
    assert_equals,
    assert_replicas_equal,
    everyone,
    momentum,
    payload,
    sgd,
    train_step,
)
from tests.on_ranks import on_ranks
from tests.refusals import refusal
from tests.tasks import Odd, gpt
from training.checkpoint import Checkpoints
from training.state_shards import plain_shards


def compare(
    cluster: Cluster,
    kind: str,
    name: str,
    steps: int,
    h: int = 2,
    make_optimizer: Optimizers = adamw,
    mu: float = 0.9,
    **options: Any,
) -> None:
    """Compare all gradients and parameters in each step, and the replicas at the end."""
    task = Task(name, cluster.world_size)
    workers, module = Workers(task, make_optimizer), task.make(cluster.rank)
    model: Any
    if kind == "local SGD":
        model = LocalSGD(module, h, **options)
    elif kind == "DiLoCo":
        model = DiLoCo(module, outer_momentum=mu)
    else:
        model = StreamingDiLoCo(module, h, everyone(cluster), outer_momentum=mu, **options)
    name_of = {parameter: name for name, parameter in model.module.named_parameters()}
    every = [fragment.parameters for fragment in getattr(model, "fragments", [])]
    names = [[name_of[p] for p in fragment] for fragment in every] or [workers.trained]
    assert list(itertools.chain(*names)) == workers.trained
    outer = OuterSteps(workers, names, h, options.get("delay", 0), mu)
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        what = f"{kind}, {name}, {cluster.world_size} ranks, H {h}, momentum {mu}, {options}, step {step}"
        workers.step()
        train_step(cluster, task, model, optimizer, step)
        expected = gradients(workers.models[cluster.rank])
        assert_same(gradients(model.module), expected, what=f"gradient, {what},")
        is_last_of_a_round = step % h == h - 1
        if kind == "local SGD":
            assert model.after_step(optimizer) == is_last_of_a_round
            if is_last_of_a_round:
                workers.average(options.get("average_state", False))
        else:
            outer.after_step()
            if kind == "streaming DiLoCo":
                model.after_step()
            elif is_last_of_a_round:
                model.outer_step()
        assert_equals(cluster, model, workers, what)
    if kind == "streaming DiLoCo":
        outer.finish()
        model.finish()
        assert_equals(cluster, model, workers, f"{what}, at the end")
        before = LEDGER.total()
        model.finish()
        assert LEDGER.total() == before, "all ranks have the same parameters already"
    elif kind == "local SGD":
        model.average(optimizer)
    assert_replicas_equal(cluster, model, what)


# "gpt" has tied weights; "odd" has frozen and unused parameters, and permuted strides.
CASES: dict[str, list[dict[str, Any]]] = {
    "local SGD": [
        {"name": "odd", "steps": 6, "h": 3, "make_optimizer": momentum},
        *({"name": "gpt", "steps": 5, "average_state": averages} for averages in (False, True)),
    ],
    "DiLoCo": [
        *({"name": name, "steps": 6} for name in ("gpt", "odd")),
        {"name": "odd", "steps": 6, "mu": 0.0},
    ],
    "streaming DiLoCo": [
        {"name": "gpt", "steps": 4, "fragments": 1},
        {"name": "odd", "steps": 4, "fragments": 2},
        {"name": "odd", "steps": 9, "h": 4, "fragments": 2, "delay": 1},
        {"name": "odd", "steps": 10, "h": 3, "fragments": 3, "delay": 2},  # several travel at the same time
        {"name": "odd", "steps": 6, "h": 3, "delay": 2, "mu": 0.0},  # sent in the last step
    ],
}


@pytest.mark.parametrize("kind", CASES)
@on_ranks(2)
def test_two_ranks_equal_workers_in_one_process(cluster: Cluster, kind: str):
    for case in CASES[kind]:
        compare(cluster, kind, **case)


@pytest.mark.parametrize("n", [1, 3, 4])
@on_ranks("n")
def test_any_number_of_ranks_equals_as_many_workers_in_one_process(cluster: Cluster, n: int):
    for kind, cases in CASES.items():
        for case in cases[:2]:
            compare(cluster, kind, **case)


@on_ranks(4)
def test_with_h_1_sgd_equals_data_parallel_bit_for_bit(cluster: Cluster):
    """All numbers are multiples of 2**-24, and small: float64 rounds no sum of them, in any order."""

    def model() -> nn.Module:
        layer = nn.Linear(3, 4).double()
        for parameter in layer.parameters():
            parameter.data = torch.arange(parameter.numel()).double().view_as(parameter) / 16
        return layer

    averaging, data_parallel = LocalSGD(model(), 1), BucketDataParallel(model())
    optimizers = [torch.optim.SGD(m.parameters(), lr=1 / 64) for m in (averaging, data_parallel)]
    for step in range(3):
        x = torch.arange(6).double().view(2, 3) % (step + 2) + cluster.rank
        for wrapped, optimizer in zip((averaging, data_parallel), optimizers, strict=True):
            optimizer.zero_grad()
            (wrapped(x).square().sum() / 4).backward()
            if wrapped is data_parallel:
                data_parallel.finish_gradient_sync()
            optimizer.step()
        assert averaging.after_step(optimizers[0])
        expected = parameters(data_parallel)
        assert_same(parameters(averaging), expected, 0, f"parameter, step {step},")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks("world_size")
def test_with_h_1_sgd_equals_one_process(cluster: Cluster, world_size: int):
    task = Task("odd", world_size)
    reference, model = task.make(0), LocalSGD(task.make(cluster.rank), 1)
    assert_same(model.module.state_dict(), reference.state_dict(), 0, "initial parameter")
    ours, theirs = sgd(model.parameters()), sgd(reference.parameters())
    for step in range(3):
        theirs.zero_grad()
        task.loss(reference, *(part.roll(7 * step, 0) for part in task.batch)).backward()
        theirs.step()
        train_step(cluster, task, model, ours, step)
        model.after_step(ours)
    assert_same(parameters(model.module), parameters(reference), what="parameter")
    assert_replicas_equal(cluster, model, "after three steps")


@on_ranks(3)
def test_with_momentum_it_equals_torchs_averagers_in_every_step(cluster: Cluster):
    """torch averages after step 1 + warm-up, and then periodically: a warm-up of H - 1 steps is our order."""
    task, h = Task("gpt", 3), 3
    model, averaged, wrapped = LocalSGD(task.make(cluster.rank), h), task.make(0), task.make(0)
    ours, plain = momentum(model.parameters()), momentum(averaged.parameters())
    averager = PeriodicModelAverager(period=h, warmup_steps=h - 1)
    post = PostLocalSGDOptimizer(
        momentum(wrapped.parameters()), PeriodicModelAverager(period=h, warmup_steps=h - 1)
    )
    for step in range(8):
        train_step(cluster, task, model, ours, step)
        assert model.after_step(ours) == (step % h == h - 1)
        train_step(cluster, task, averaged, plain, step)
        averager.average_parameters(averaged.parameters())
        train_step(cluster, task, wrapped, post, step)
        for expected in (averaged, wrapped):
            assert_same(parameters(model.module), parameters(expected), what=f"parameter, step {step},")


@on_ranks(2)
def test_the_state_of_a_parameter_with_one_number_is_averaged_too(cluster: Cluster):
    model = LocalSGD(nn.ParameterList([torch.ones(())]), 1, average_state=True)
    [parameter] = model.parameters()
    optimizer = momentum([parameter])
    parameter.grad = torch.tensor(float(cluster.rank))
    optimizer.step()
    model.average(optimizer)
    assert optimizer.state[parameter]["momentum_buffer"] == 0.5


@on_ranks(3)
def test_an_outer_rate_of_1_without_momentum_is_local_sgd(cluster: Cluster):
    task = Task("gpt", 3)
    local, diloco = LocalSGD(task.make(0), 3), DiLoCo(task.make(0), outer_lr=1.0, outer_momentum=0.0)
    optimizers = [momentum(model.parameters()) for model in (local, diloco)]
    for step in range(6):
        for model, optimizer in zip((local, diloco), optimizers, strict=True):
            train_step(cluster, task, model, optimizer, step)
        if local.after_step(optimizers[0]):
            diloco.outer_step()
        assert_same(parameters(diloco), parameters(local), what=f"parameter, step {step},")


@pytest.mark.parametrize("kind", ["local SGD", "DiLoCo"])
@on_ranks(4)
def test_the_mean_is_over_the_ranks_of_a_group(cluster: Cluster, kind: str):
    group, pair, _ = in_pairs(cluster)
    layer, model = nn.Linear(1, 1, bias=False), None
    if kind == "local SGD":
        model = LocalSGD(layer, 1, group)
    else:
        model = DiLoCo(layer, group, outer_lr=1.0, outer_momentum=0.0)
    nn.init.constant_(layer.weight, cluster.rank)
    if kind == "local SGD":
        model.average(sgd(model.parameters()))
    else:
        model.outer_step()
    assert layer.weight.item() == pytest.approx(pair + 1)  # of 0 and 2, or of 1 and 3


@on_ranks(2)
def test_a_fragment_is_averaged_with_the_same_one_of_the_other_ranks(cluster: Cluster):
    """Both fragments have the same size, so no collective would notice another order."""
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model = StreamingDiLoCo(layers, 2, fragments=2, outer_lr=1.0, outer_momentum=0.0)
    for _ in range(2):
        for i, layer in enumerate(layers):
            nn.init.constant_(layer.weight, 10.0 * i + cluster.rank)
        model.after_step()
        model.finish()
    found = {str(i): layer.weight.detach() for i, layer in enumerate(layers)}
    expected = {str(i): torch.full((2, 2), 10.0 * i + 0.5) for i in range(2)}
    assert_same(found, expected, 1e-6, "parameter of layer")


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@on_ranks(3)
def test_what_is_sent_is_rounded_and_no_more(cluster: Cluster, wire: str):
    """bf16 rounds a change by 1/256 of it at most, and each sum of a ring again; int8 by 1/254, twice."""
    task, n = Task("gpt", 3), 3
    workers = Workers(task, adamw)
    model = StreamingDiLoCo(task.make(cluster.rank), 2, wire=wire, outer_lr=1.0, outer_momentum=0.0)
    optimizer, start = adamw(model.parameters()), {name: workers.mean(name) for name in workers.trained}
    for step in range(2):
        workers.step()
        train_step(cluster, task, model, optimizer, step)
        model.after_step()
    assert_replicas_equal(cluster, model, wire)
    largest = max((named[name] - start[name]).abs().max().item() for named in workers.named for name in start)
    off = max((model.module.get_parameter(name) - workers.mean(name)).abs().max().item() for name in start)
    assert 0 < off <= largest * {"bf16": (n + 1) / 256, "int8": 1.01 / 127}[wire]


@on_ranks(3)
def test_local_sgd_sends_a_rings_bytes_once_in_h_steps(cluster: Cluster):
    n = cluster.world_size
    for h, steps, make_optimizer, copies in ((1, 3, sgd, 1), (3, 7, momentum, 2), (4, 8, adamw, 3)):
        model = LocalSGD(nn.Linear(5, 6), h, average_state=True)  # 36 numbers
        optimizer, rounds = make_optimizer(model.parameters()), 0
        start, before = LEDGER.total(), payload()
        for _ in range(steps):
            model(torch.ones(1, 5)).sum().backward()
            optimizer.step()
            rounds += model.after_step(optimizer)
        assert payload() - before == steps // h * 2 * (n - 1) * copies * 36 * 4 // n
        assert LEDGER.total() - start == model.traffic(optimizer) * rounds


@on_ranks(3)
def test_an_outer_step_sends_a_rings_bytes_and_a_step_nothing(cluster: Cluster):
    n, model = cluster.world_size, DiLoCo(nn.Linear(5, 6))  # 36 numbers
    before = LEDGER.total()
    model(torch.ones(1, 5)).sum().backward()
    sgd(model.parameters()).step()
    assert LEDGER.total() == before
    model.outer_step()
    assert LEDGER.total() - before == model.traffic() == Traffic(2 * (n - 1) * 36 * 4 // n, 2 * (n - 1))


@on_ranks(3)
def test_streaming_sends_the_bytes_of_each_fragment_once_in_h_steps(cluster: Cluster):
    def send(cluster: Cluster, steps: int, **options: Any) -> int:
        layers = nn.Sequential(*(nn.Linear(5, 6, bias=False) for _ in range(4)))  # 120 numbers
        model = StreamingDiLoCo(layers, group=everyone(cluster), **options)
        start, before, expected = LEDGER.total(), payload(), Traffic()
        for step in range(steps):
            model.after_step()
            if step == steps - 1:
                model.finish()
            expected += model.traffic()
        assert expected == LEDGER.total() - start, options
        return payload() - before

    n = cluster.world_size
    all_at_once = 2 * (n - 1) * 120 * 4 // n
    assert send(cluster, 6, sync_every=1) == 6 * all_at_once
    assert send(cluster, 8, sync_every=4) == 2 * all_at_once
    assert send(cluster, 9, sync_every=4) == 3 * all_at_once  # and once more after the last step
    assert send(cluster, 8, sync_every=4, fragments=2) == 2.5 * all_at_once
    assert send(cluster, 12, sync_every=4, fragments=4, delay=2) == 3.75 * all_at_once
    assert send(cluster, 8, sync_every=4, wire="bf16") == all_at_once
    assert send(cluster, 8, sync_every=4, wire="int8") == 2 * 2 * (n - 1) * 1028  # a block for each rank


def test_fragments_are_about_equal_and_have_each_parameter_once_in_order():
    trained = list(gpt(0).parameters())
    for number in (1, 2, 3, 5):
        fragments = divide_in_order(trained, number)
        assert len(fragments) <= number
        assert all(a is b for a, b in zip(itertools.chain(*fragments), trained, strict=True))
    equal = [nn.Parameter(torch.zeros(3)) for _ in range(6)]
    assert [len(fragment) for fragment in divide_in_order(equal, 3)] == [2, 2, 2]


@on_ranks(1)
def test_options_that_do_not_fit_are_refused_in_a_sentence(cluster: Cluster):
    for options, sentence in (
        ({"sync_every": 0}, "^sync_every is 0: it is a number of steps, at least 1.$"),
        ({"fragments": 0}, "^fragments is 0: it is a number from 1 to "),
        (
            {"fragments": 3},
            "^fragments is 3: .* 2 steps between two synchronisations, and 9 parameters.$",
        ),
        ({"delay": 2}, "^delay is 2: it is a number of steps from 0, and less than sync_every, 2.$"),
        ({"delay": 1}, "^With a delay, .* give DiLoCo a group of its own.$"),
        ({"wire": "topk"}, "^wire is topk: choose one of float32, bf16, int8.$"),
        ({"outer_lr": 0.0}, "^outer_lr is 0.0: it is a number above 0.$"),
        ({"outer_momentum": 1.0}, "^outer_momentum is 1.0: it is a number from 0, and less than 1.$"),
    ):
        with pytest.raises(WorkbookError, match=sentence):
            StreamingDiLoCo(Odd(0), **{"sync_every": 2, **options})


@on_ranks(2)
def test_what_would_train_wrongly_is_refused_in_a_sentence(cluster: Cluster):
    with pytest.raises(WorkbookError, match=r"^sync_every is 0: it is a number of steps, at least 1.$"):
        LocalSGD(nn.Linear(1, 1), 0)
    model = LocalSGD(Odd(0), 1, average_state=True)  # has a layer that is not used
    optimizer = momentum(model.parameters())
    train_step(cluster, Task("odd", 2), model, optimizer, 0)
    with pytest.raises(WorkbookError, match=r"has had no gradient on this rank.*leave average_state out"):
        model.average(optimizer)
    for changed in (model, DiLoCo(Odd(0))):
        changed.module.first.requires_grad_(False)
        with pytest.raises(WorkbookError, match=r"first.weight was added, .*frozen.* after wrapping"):
            changed(torch.ones(1, 7).double())
    dist.barrier()


@on_ranks(2)
def test_diloco_refuses_to_load_after_wrapping_as_its_anchor_would_stay_behind(cluster: Cluster):
    for make in (DiLoCo, StreamingDiLoCo):
        model = make(Odd(0))
        before = copy.deepcopy(model.module.state_dict())
        with pytest.raises(WorkbookError, match=f"{make.__name__} keeps the parameters of the last round"):
            model.module.load_state_dict(Odd(1).state_dict())
        with pytest.raises(WorkbookError, match=f"{make.__name__} keeps the parameters of the last round"):
            model.module.first.load_state_dict(Odd(1).first.state_dict())
        assert_same(model.module.state_dict(), before, 0)


@on_ranks(2)
def test_diloco_refuses_a_checkpoint_after_wrapping(cluster: Cluster, tmp_path):
    model, checkpoints = DiLoCo(Odd(0)), Checkpoints(tmp_path, cluster)
    shards = plain_shards(model.module, momentum(model.parameters()))
    checkpoints.save(1, shards)
    assert "DiLoCo keeps the parameters of the last round" in refusal(checkpoints.load, 1, shards)


@on_ranks(2)
def test_streaming_diloco_refuses_to_finish_where_ranks_have_taken_other_numbers_of_steps(cluster: Cluster):
    model = StreamingDiLoCo(Odd(0), sync_every=2)
    for _ in range(2 + 2 * cluster.rank):  # each rank ends with a synchronisation, which is not done here
        with mock.patch.object(model, "_average", lambda *_: mock.Mock()):
            model.after_step()
    with pytest.raises(WorkbookError, match=r"The ranks have taken \[2, 4\] steps, so their models differ"):
        model.finish()
