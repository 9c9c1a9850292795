"""Set up each stage of ZeRO, and compare its training with one process."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce, broadcast, use_pattern
from lab.check import assert_same, parameters
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.trace.ledger import Traffic
from tests.data_parallel.equivalence import Loss, accumulate, mine
from zero.shards import ParameterShard
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero1_textbook import TextbookZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

STAGES = ["zero1", "zero2", "zero3"]
OF_PARAMETERS = {
    "zero1_textbook": TextbookZeroOptimizer,
    "zero1": ZeroOptimizer,
    "zero2": ZeroGradientOptimizer,
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    # The gradient of a key's bias is zero except for rounding, which AdamW would magnify with a smaller eps.
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
}
SMALL_BUCKETS = {"bucket_mb": 1e-6}  # one for each parameter


def deep_gpt(seed: int) -> GPT:
    config = GPTConfig(vocab_size=61, block_size=8, num_layers=3, num_heads=2, width=14, tied=seed != 99)
    return GPT(config, seed=seed).double()


class Blocks(nn.Module):
    """Three layers of equal size, each a block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sharded:
    """A model of one stage and its optimizer, with the same method names for all stages."""

    def __init__(
        self,
        stage: str,
        module: nn.Module,
        optimizer: str,
        group: Group = None,
        wrap: Callable[..., Any] = FullyShardedDataParallel,  # of stage 3
        pattern: str | None = None,
        **options: Any,
    ):
        use_pattern(pattern, group)
        optimizer_class, defaults = OPTIMIZERS[optimizer]
        self.module = module
        if stage == "zero3":
            self.model = self.syncing = wrap(module, group, **options)
            self.optimizer = optimizer_class(self.model.parameters(), **defaults)
        else:
            wrap = OF_PARAMETERS[stage]
            self.model = module
            for buffer in module.buffers():  # an optimizer does not see them
                broadcast(buffer, group=group)
            self.optimizer = wrap(
                module.named_parameters(), optimizer_class, group=group, **options, **defaults
            )
            self.syncing = self.optimizer
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.shards = {names[shard.parameter]: shard for shard in self.syncing.parameter_shards}

    def accumulate(self, loss: Loss, batch: Sequence[Tensor], microbatches: int) -> None:
        """Compute the gradients of a step, as the lessons do."""
        if not isinstance(self.syncing, ZeroGradientOptimizer):
            accumulate(self.model, loss, batch, microbatches, self.syncing)
            return
        for x, y in zip(*(part.chunk(microbatches) for part in batch), strict=True):
            (loss(self.model, x, y) / microbatches).backward()
            self.syncing.finish_gradient_sync()

    def expected_traffic(self, reductions: int = 1, is_clipped: bool = False) -> Traffic:
        """Return the lesson's formula for this stage."""
        return self.syncing.traffic(reductions, is_clipped)

    def gradients(self) -> dict[str, Tensor]:
        """Return the full mean gradients, on all ranks."""
        trained = {name: shard for name, shard in self.shards.items() if shard.tensor.requires_grad}
        return full_tensors(trained, lambda shard: shard.tensor.grad, self.syncing.group)

    def parameters(self) -> dict[str, Tensor]:
        """Return the full parameters, on all ranks."""
        return full_tensors(self.shards, lambda shard: shard.tensor, self.syncing.group)


def full_tensors(
    shards: dict[str, ParameterShard], what: Callable[[ParameterShard], Tensor], group: Group = None
) -> dict[str, Tensor]:
    """Return the full tensors of which the group's ranks have shards. Every number must be in one rank's."""
    names = sorted(shards)
    sizes = [shards[name].parameter.shape.numel() for name in names]
    device = shards[names[0]].tensor.device
    values, owners = torch.zeros(2, sum(sizes), dtype=torch.float64, device=device)
    for name, value, owner in zip(names, values.split(sizes), owners.split(sizes), strict=True):
        part, start = what(shards[name]).detach(), shards[name].start
        value[start : start + part.numel()] = part.flatten()
        owner[start : start + part.numel()] = 1
    both = torch.cat([values, owners])
    all_reduce(both, group=group)
    values, owners = both.split(sum(sizes))
    once = {name: torch.ones(size) for name, size in zip(names, sizes, strict=True)}
    found = dict(zip(names, owners.split(sizes), strict=True))
    assert_same(found, once, 0, "number of ranks that own each element of")
    return {
        name: value.view(shards[name].parameter.shape)
        for name, value in zip(names, values.split(sizes), strict=True)
    }


def gradients_with_zeros(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of what is trained, with zeros for an unused parameter."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def compare_with_one_process(
    cluster: Cluster,
    stage: str,
    optimizer: str,
    make: Callable[[int], nn.Module],
    loss: Loss,
    batch: tuple[Tensor, Tensor],
    microbatches: Sequence[int] = (1, 3),
    clip: float | None = None,
    rtol: float = 1e-9,
    **options: Any,
) -> None:
    """Compare every gradient in a step for each number of `microbatches`, and all parameters in the end."""
    what = f"{stage}, {optimizer}, {cluster.world_size} ranks"
    reference = make(0)
    ours = Sharded(stage, make(cluster.rank), optimizer, **options)
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    theirs = optimizer_class(reference.parameters(), **defaults)
    for step, count in enumerate(microbatches):
        theirs.zero_grad()
        loss(reference, *batch).backward()
        expected = gradients_with_zeros(reference)
        ours.optimizer.zero_grad()
        ours.accumulate(loss, mine(cluster, batch), count)
        if clip is not None:
            norms = ours.syncing.clip_grad_norm_(clip), nn.utils.clip_grad_norm_(reference.parameters(), clip)
            assert_same({"norm": norms[0]}, {"norm": norms[1]}, rtol, what)
        assert_same(ours.gradients(), expected, rtol, f"gradient, {what}, step {step},")
        theirs.step()
        ours.optimizer.step()
    kept = {name: p for name, p in parameters(reference).items() if name in ours.shards}
    assert_same(ours.parameters(), kept, rtol, f"parameter, {what},")
    state = ours.model.full_state_dict() if stage == "zero3" else ours.module.state_dict()
    assert_same(state, reference.state_dict(), rtol, f"state, {what},")
