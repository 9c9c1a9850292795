"""Pipelines against one process: the loss, every gradient at each of some steps, every parameter after them.

All ranks make the same model and compare what they have of it; each call compares the bytes it has sent, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.check import Tensors, assert_same
from lab.cluster import Cluster
from lab.models.model import GPT, MLP, BabyCNN, GPTConfig, loss_of
from lab.trace.ledger import LEDGER
from pipeline_parallel.actions import Table, num_microbatches, placement
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import SCHEDULES, table_of
from pipeline_parallel.stage import balanced_stages
from pipeline_parallel.train_1f1b_by_hand import OneForwardOneBackward
from pipeline_parallel.train_afab import AllForwardAllBackward
from pipeline_parallel.train_model_parallel import ModelParallel
from pipeline_parallel.train_torch_pipelining import TorchPipeline

RTOL, LEARNING_RATE = 1e-9, 0.3
VOCABULARY, TIME = 13, 5

Batch = tuple[Tensor, Tensor]

BY_HAND = {"naive": ModelParallel, "gpipe": AllForwardAllBackward, "1f1b": OneForwardOneBackward}

# Name and chunks, with interleaving in two and in three.
ALL_SCHEDULES = [*((name, 2) for name in SCHEDULES), ("interleaved", 3)]


def gpt(**changes: Any) -> GPT:
    sizes = {"vocab_size": VOCABULARY, "block_size": TIME, "num_layers": 3, "num_heads": 2, "width": 8}
    return GPT(GPTConfig(**{**sizes, **changes})).double()


def text(rows: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (rows, TIME + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def mlp(layers: int) -> MLP:
    """Make layers of different widths, so that a tensor of another boundary does not fit."""
    return MLP([5 + i % 4 for i in range(layers)] + [6]).double()


def vectors(rows: int, width: int = 5) -> Batch:
    random = torch.Generator().manual_seed(3)
    return torch.randn(rows, width, generator=random).double(), torch.randint(6, (rows,), generator=random)


def cnn() -> BabyCNN:
    return BabyCNN().double()


def images(rows: int) -> Batch:
    random = torch.Generator().manual_seed(4)
    x = torch.randn(rows, 1, 8, 8, generator=random).double()
    return x, torch.randint(10, (rows,), generator=random)


def own_gradients(pipeline: OwnStages) -> dict[str, Tensor | None]:
    """Return a copy of each of this rank's gradients, by its name in the full model."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in pipeline.named_own_parameters().items()
    }


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of a full model as own_gradients does; a tied one is under both of its names."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of each parameter; a tied one under both of its names."""
    return {
        name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def only(whole: Tensors, part: Tensors) -> dict[str, Tensor | None]:
    """Return those of the full model's tensors that are in `part`."""
    return {name: whole[name] for name in part}


class OneProcess(NamedTuple):
    """Holds how one process trains: the loss and all gradients of each step."""

    steps: list[tuple[Tensor, dict[str, Tensor | None]]]
    trained: dict[str, Tensor]


_known: dict[Any, OneProcess] = {}


def of_one_process(make: Callable[[], nn.Module], batch: Batch, steps: int) -> OneProcess:
    """Train on one process, and remember the result: many schedules are compared with it."""
    maker = (make.func, make.args, *make.keywords.items()) if isinstance(make, partial) else make
    key = maker, steps, *(tensor.numpy().tobytes() for tensor in batch)
    if key not in _known:
        model, found = make(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model(batch[0]), batch[1])
            loss.backward()
            found.append((loss.detach(), gradients_of(model)))
            optimizer.step()
        _known[key] = OneProcess(found, parameters_of(model))
    return _known[key]


def compare_with_one_process(
    cluster: Cluster,
    make: Callable[[], nn.Module],
    table: Table,
    batch: Batch,
    steps: int = 2,
    what: str = "",
    by_hand: type[OwnStages] | None = None,
    schedule: str = "",
    **options: Any,
) -> OwnStages:
    """`by_hand` is the class of the pipeline, which may be torch's with the name of its schedule."""
    x, y = (part.to(cluster.device) for part in batch)
    rank_of, microbatches = placement(table), num_microbatches(table)
    expected, model = of_one_process(make, batch, steps), make().to(cluster.device)
    what += (
        f" {type(model).__name__}, {len(rank_of)} stages on {len(table)} ranks, m={microbatches}, {options}"
    )
    example = x[: len(x) // microbatches]
    pipeline: Any
    if by_hand is None:
        pipeline = Pipeline(model, table, loss_of, example, **options)
    else:
        stages = balanced_stages(model, len(rank_of))
        if by_hand is TorchPipeline:
            pipeline = TorchPipeline(stages, schedule, microbatches, example, rank_of)
        else:
            pipeline = by_hand(stages, microbatches, loss_of, example, **options)
        del stages
    del model
    own = pipeline.named_own_parameters()
    parameters = list(pipeline.parameters()) or [torch.zeros(())]  # a stage of activation functions has none
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    for step, (loss, gradients) in enumerate(expected.steps):
        where = f"{what}, step {step}"
        optimizer.zero_grad()
        before = LEDGER.total()
        given = pipeline.step(x, y)
        pipeline.finish_gradient_sync()
        sent = LEDGER.total() - before
        wanted = loss if rank_of[len(rank_of) - 1] == pipeline.rank else None
        assert_same({"loss": given}, {"loss": wanted}, RTOL, f"result,{where},")
        assert_same(own_gradients(pipeline), only(gradients, own), RTOL, f"gradient,{where},")
        assert sent == pipeline.traffic(), f"{where}: {sent}, and {pipeline.traffic()}"
        optimizer.step()
    trained = {name: parameter.detach() for name, parameter in own.items()}
    assert_same(trained, only(expected.trained, own), RTOL, f"parameter,{what},")
    return pipeline


def compare_schedule(
    cluster: Cluster,
    name: str,
    microbatches: int,
    make: Callable[[], nn.Module],
    batch_of: Callable[[int], Batch],
    chunks: int = 2,
    rows: int = 2,
    **options: Any,
) -> None:
    """Call compare_with_one_process for the schedule of that name; a microbatch has `rows` rows."""
    table = table_of(name, cluster.world_size, microbatches, chunks)
    batch, what = batch_of(rows * microbatches), f" {name}{options.pop('what', '')}"
    compare_with_one_process(cluster, make, table, batch, what=what, schedule=name, **options)
