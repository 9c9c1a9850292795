"""Train n workers in one process, each alone on its slice of the batch, to compare ranks with them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from comm.wire.groups import own_group
from lab.check import assert_same, parameters
from lab.cluster import Cluster
from lab.models.text import rank_slice
from lab.trace.ledger import LEDGER
from tests.tasks import Odd, examples, gpt, odd_loss, text, text_loss
from training.report import replica_digests

Optimizers = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)  # a small eps magnifies rounding


class Task:
    """A model and its data: "gpt" has tied weights; "odd" frozen and unused ones, and permuted strides."""

    def __init__(self, name: str, world_size: int) -> None:
        self.make, self.loss = (gpt, text_loss) if name == "gpt" else (Odd, odd_loss)
        self.batch, self.ranks = text() if name == "gpt" else examples(world_size), world_size

    def backward(self, model: nn.Module, rank: int, step: int) -> None:
        """Compute the gradients of the rank's slice; each step has the examples in another order."""
        x, y = (rank_slice(part.roll(7 * step, 0), rank, self.ranks) for part in self.batch)
        self.loss(model, x, y).backward()


class Workers:
    """Models of n workers, which begin with the same parameters. Each has an optimizer of its own."""

    def __init__(self, task: Task, make_optimizer: Optimizers) -> None:
        self.task, self.steps = task, 0
        self.models = [task.make(0) for _ in range(task.ranks)]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]
        self.named = [dict(model.named_parameters()) for model in self.models]
        self.trained = [name for name, p in self.named[0].items() if p.requires_grad]

    def step(self) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            self.task.backward(model, rank, self.steps)
            optimizer.step()
        self.steps += 1

    def states(self, name: str) -> list[dict[str, Tensor]]:
        """Return what each worker's optimizer keeps of a parameter."""
        pairs = zip(self.optimizers, self.named, strict=True)
        return [optimizer.state[named[name]] for optimizer, named in pairs]

    def mean(self, name: str) -> Tensor:
        return torch.stack([named[name].detach() for named in self.named]).mean(0)

    def average(self, averages_state: bool = False) -> None:
        """Give all workers the mean of their parameters, and perhaps of AdamW's state."""
        with torch.no_grad():
            for name in self.trained:
                mean, states = self.mean(name), self.states(name)
                for named in self.named:
                    named[name].copy_(mean)
                for key in ("exp_avg", "exp_avg_sq") if averages_state else ():
                    mean = torch.stack([state[key] for state in states]).mean(0)
                    for state in states:
                        state[key].copy_(mean)


class OuterSteps:
    """What DiLoCo's ranks must do, told of n workers in one process, parameter by parameter.

    `fragments` are names of parameters; plain DiLoCo has one fragment, and no delay.
    """

    def __init__(self, workers: Workers, fragments: list[list[str]], h: int, delay: int = 0, mu: float = 0.9):
        self.workers, self.h, self.delay = workers, h, delay
        self.fragments = fragments
        self.anchors = {name: nn.Parameter(workers.mean(name)) for name in workers.trained}
        self.outer = torch.optim.SGD(self.anchors.values(), lr=0.7, momentum=mu, nesterov=mu > 0)
        self.travelling: list[tuple[int, dict[str, list[Tensor]]]] = []

    @torch.no_grad()
    def after_step(self) -> None:
        step = self.workers.steps
        for i, names in enumerate(self.fragments):
            if step % self.h == (i + 1) * self.h // len(self.fragments) % self.h:
                sent = {name: [one[name].clone() for one in self.workers.named] for name in names}
                self.travelling.append((step + self.delay, sent))
        for arrival in [one for one in self.travelling if one[0] == step]:
            self._arrive(arrival)

    def _arrive(self, arrival: tuple[int, dict[str, list[Tensor]]]) -> None:
        self.travelling.remove(arrival)
        sent = arrival[1]
        self.outer.zero_grad()
        for name, of_workers in sent.items():
            self.anchors[name].grad = torch.stack([self.anchors[name] - one for one in of_workers]).mean(0)
        self.outer.step()
        for name, of_workers in sent.items():
            for one, named in zip(of_workers, self.workers.named, strict=True):
                named[name] += self.anchors[name] - one

    @torch.no_grad()
    def finish(self) -> None:
        while self.travelling:
            self._arrive(self.travelling[0])
        self.workers.average()


def train_step(
    cluster: Cluster, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Take this rank's step of the workers' training."""
    optimizer.zero_grad()
    task.backward(model, cluster.rank, step)
    optimizer.step()


def assert_equals(cluster: Cluster, model: nn.Module, workers: Workers, what: str) -> None:
    """Compare each parameter of this rank with its worker's."""
    expected = parameters(workers.models[cluster.rank])
    assert_same(parameters(model.module), expected, what=f"parameter, {what},")


def assert_replicas_equal(cluster: Cluster, model: nn.Module, what: str) -> None:
    assert len(set(replica_digests(cluster, model))) == 1, what


def everyone(cluster: Cluster) -> Any:
    """Return a group of all ranks in which nothing else is sent."""
    return own_group([list(range(cluster.world_size))])


def payload() -> int:
    """Return the bytes that this rank has sent, without the headers by which ranks agree on a collective."""
    return sum(sent.bytes_sent for entry, sent in LEDGER.rows().items() if entry.pattern != "header")
