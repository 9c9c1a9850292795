"""Set up each stage of ZeRO, and compare its training with one process."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce, broadcast
from data_parallel.flat import Piece
from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from tests.data_parallel.equivalence import Loss, mine
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

BOTH = (ZeroOptimizer, ZeroGradientOptimizer)
STAGES = ["zero1", "zero2", "zero3"]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    # The gradient of a key's bias is zero except for rounding, which AdamW would magnify with a smaller eps.
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
}


def deep_gpt(seed: int) -> GPT:
    config = GPTConfig(vocab_size=61, block_size=8, num_layers=3, num_heads=2, width=14, tied=seed != 99)
    return GPT(config, seed=seed).double()


def total(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return model(x).sum()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sharded:
    """A model of one stage and its optimizer, with the same method names for all stages."""

    def __init__(self, stage: str, module: nn.Module, optimizer: str, group: Group = None, **options: Any):
        optimizer_class, defaults = OPTIMIZERS[optimizer]
        self.module = module
        if stage == "zero3":
            self.model = self.syncing = FullyShardedDataParallel(module, group, **options)
            self.optimizer = optimizer_class(self.model.parameters(), **defaults)
            self.pieces = self.model.pieces
            return
        wrap = {"zero1": ZeroOptimizer, "zero2": ZeroGradientOptimizer}[stage]
        self.model = module
        for buffer in module.buffers():  # an optimizer does not see them
            broadcast(buffer, group=group)
        self.optimizer = wrap(module.named_parameters(), optimizer_class, group=group, **options, **defaults)
        self.syncing = self.optimizer
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.pieces = {names[id(piece.parameter)]: piece for piece in self.optimizer.pieces}

    def accumulate(self, loss: Loss, batch: Sequence[Tensor], microbatches: int) -> None:
        """Compute the gradients of a step, as the lessons do."""
        parts = list(zip(*(part.chunk(microbatches) for part in batch), strict=True))
        for i, (x, y) in enumerate(parts):
            with contextlib.nullcontext() if i == len(parts) - 1 else self.syncing.no_sync():
                (loss(self.model, x, y) / microbatches).backward()
        self.syncing.finish_gradient_sync()


def full_tensors(
    pieces: dict[str, Piece], what: Callable[[Piece], Tensor | None]
) -> dict[str, Tensor | None]:
    """Return the full tensor of each parameter's pieces on all ranks, or None if a rank's piece has none."""
    names = sorted(pieces)
    sizes = [pieces[name].parameter.shape.numel() for name in names]
    # For each number: its value, and how many ranks have it. For each parameter: how many ranks have none.
    device = pieces[names[0]].tensor.device
    values, owners = torch.zeros(2, sum(sizes), dtype=torch.float64, device=device)
    missing = torch.zeros(len(names), dtype=torch.float64, device=device)
    for name, value, owner, absent in zip(
        names, values.split(sizes), owners.split(sizes), missing, strict=True
    ):
        part, start = what(pieces[name]), pieces[name].start
        if part is None:
            absent += 1
        else:
            value[start : start + part.numel()] = part.detach()
            owner[start : start + part.numel()] = 1
    message = torch.cat([values, owners, missing])
    all_reduce(message)
    values, owners, missing = message.split([sum(sizes), sum(sizes), len(names)])
    result: dict[str, Tensor | None] = {}
    for name, value, owner, absent in zip(
        names, values.split(sizes), owners.split(sizes), missing, strict=True
    ):
        assert absent > 0 or (owner == 1).all(), f"{name}: the pieces overlap, or leave something out"
        result[name] = None if absent > 0 else value.view(pieces[name].parameter.shape)
    return result


def compare_with_one_process(
    cluster: Cluster,
    stage: str,
    optimizer: str,
    make: Callable[[int], nn.Module],
    loss: Loss,
    batch: tuple[Tensor, Tensor],
    microbatches: Sequence[int] = (1, 2, 3),
    clip: float | None = None,
    rtol: float = 1e-9,
    **options: Any,
) -> None:
    """Compare every gradient and every parameter after each step."""
    what = f"{stage}, {optimizer}, {cluster.world_size} ranks"
    reference = make(0)
    ours = Sharded(stage, make(cluster.rank), optimizer, **options)
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    theirs = optimizer_class(reference.parameters(), **defaults)
    for step, count in enumerate(microbatches):
        theirs.zero_grad()
        loss(reference, *batch).backward()
        ours.optimizer.zero_grad()
        ours.accumulate(loss, mine(cluster, batch), count)
        if clip is not None:
            expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip)
            norm = ours.syncing.clip_grad_norm_(clip)
            assert_same({"norm": norm}, {"norm": expected_norm}, rtol, what)
        expected = {name: g for name, g in gradients(reference).items() if name in ours.pieces}
        assert_same(
            full_tensors(ours.pieces, lambda piece: piece.tensor.grad),
            expected,
            rtol,
            f"gradient, {what}, step {step},",
        )
        theirs.step()
        ours.optimizer.step()
        kept = {name: p for name, p in parameters(reference).items() if name in ours.pieces}
        assert_same(
            full_tensors(ours.pieces, lambda piece: piece.tensor),
            kept,
            rtol,
            f"parameter, {what}, step {step},",
        )
    if stage != "zero3":
        assert_same(parameters(ours.module), parameters(reference), rtol, f"parameter, {what},")


def averaged(model: nn.Module, optimizer: Any) -> dict[str, Tensor | None]:
    """Return the mean gradients in full."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return full_tensors(
        {names[piece.parameter]: piece for piece in optimizer.pieces}, lambda piece: piece.tensor.grad
    )
