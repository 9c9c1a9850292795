"""A small training of flat shards, without a model, whose state can be saved and loaded."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import all_gather
from data_parallel.flat import Flat, Piece
from lab.cluster import Cluster
from zero import sharded_checkpoint

SHAPES: dict[str, tuple[int, ...]] = {
    "first.weight": (3, 5),
    "first.bias": (3,),
    "scale": (),
    "last.weight": (7, 2),
    "never": (5,),
    "nothing": (0, 3),
}


FLAT = [list(SHAPES)]


BUCKETS = [["never", "scale"], ["last.weight"], ["nothing", "first.bias", "first.weight"]]


class CountingSGD(torch.optim.Optimizer):
    """An optimizer as a learner would write it: the step count is a plain integer, not a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.data -= group["lr"] / state["count"] * parameter.grad


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "counting": (CountingSGD, {"lr": 0.1}),
}


class Training:
    """Sharded parameters, an optimizer over them, a buffer, and gradients that depend on all of these."""

    def __init__(
        self,
        cluster: Cluster,
        optimizer: str,
        buckets: list[list[str]] = FLAT,
        seed: int = 0,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float64,
        split: int = 2,
        frozen: str = "",
        **options: Any,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        values = {name: torch.randn(shape, generator=random, dtype=dtype) for name, shape in shapes.items()}
        self.parameters = {name: nn.Parameter(value) for name, value in values.items()}
        self.rest = {
            "steps": torch.tensor(float(seed)),
            "mean": torch.full((2, 3), float(seed), dtype=dtype).t(),
        }
        self.pieces: dict[str, Piece] = {}
        self.buckets: list[tuple[Tensor, Tensor]] = []
        for names in buckets:
            parameters = [self.parameters[name] for name in names]
            flat = Flat(parameters, cluster.rank, cluster.world_size)
            full = torch.full((flat.numel,), 1e9, dtype=dtype)  # in a checkpoint, padding would show
            for parameter, view in zip(parameters, flat.views(full), strict=True):
                parameter.data = view.copy_(parameter.detach())
            self.buckets.append((full, full[flat.mine]))
            for name, (start, part) in zip(names, flat.pieces(full[flat.mine]), strict=True):
                self.pieces[name] = Piece(self.parameters[name], start, nn.Parameter(part))
        if frozen:
            self.pieces["never"].tensor.requires_grad_(False)
        if frozen == "rest":
            self.rest["never"] = self.pieces.pop("never").parameter.detach()
        tensors = [self.pieces[name].tensor for name in sorted(self.pieces)]
        groups = [{"params": tensors[:split]}, {"params": tensors[split:], "lr": 0.05}]
        optimizer_class, defaults = OPTIMIZERS[optimizer]
        self.optimizer = optimizer_class(groups, **(defaults | options))

    def gather(self) -> None:
        for full, shard in self.buckets:
            all_gather(full, shard.clone())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for name, piece in self.pieces.items():
                value = piece.parameter.detach().reshape(-1)
                gradient = (value + self.rest["mean"].sum()).sin() + self.rest["steps"]
                end = piece.start + piece.tensor.numel()
                piece.tensor.grad = None if name == "never" else gradient[piece.start : end]
            self.optimizer.step()
            self.gather()
            self.rest["steps"] += 1
            self.rest["mean"] *= 0.9
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9  # as a scheduler would

    def save(self, cluster: Cluster, directory: Path, **extra: Any) -> None:
        sharded_checkpoint.save(cluster, str(directory), self.pieces, self.optimizer, extra, self.rest)

    def load(self, cluster: Cluster, directory: Path) -> dict[str, Any]:
        extra = sharded_checkpoint.load(cluster, str(directory), self.pieces, self.optimizer, self.rest)
        self.gather()
        return extra

    def result(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def states(self) -> dict[str, dict[str, Any]]:
        return {name: self.optimizer.state.get(piece.tensor, {}) for name, piece in self.pieces.items()}


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal in type, dtype, and every bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b
