"""Give the ZeRO scripts what they share: arguments, checkpoints in shards, the memory report.

run = ZeroRun(cluster, args, "zero1")
optimizer = ZeroOptimizer(model.parameters(), run.optimizer_class, pattern=run.pattern, lr=args.lr)
memory = run.memory(1, model, optimizer, flats)
with run.checkpointing(model, optimizer) as first:
    for step in range(first, args.steps):
        with run.step() as record:
            with span("forward", "forward"), memory.forward():
                ...
run.finish(model, **memory.finish())
"""

import dataclasses
import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint as recomputed

from comm.collectives import broadcast
from data_parallel.flat import Flat, Piece
from lab.cluster import Cluster
from training.arguments import AccumulationArgs, ClipArgs, NotOffered, ShardPattern
from training.run import Run
from zero.memory import MemoryReport, flat_share, replicated, states_of
from zero.sharded_checkpoint import ShardedState, pieces_of_dtensors
from zero.sharded_optimizer import ShardedOptimizer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd": (torch.optim.SGD, {}),
}


@dataclasses.dataclass
class ZeroArgs(ClipArgs, AccumulationArgs):
    """Train a small GPT on the source of Python's standard library, with the training state sharded."""

    optimizer: Literal["adamw", "momentum", "sgd"] = "adamw"
    """Optimizer. Its state is twice the parameters' size (adamw), the same size (momentum) or empty (sgd)."""
    pattern: Literal[ShardPattern, None] = None
    """Algorithm of the collectives: who sends what to whom. ring is the textbook's; pipelined_ring sends each
    chunk in pieces; tree sends all data through rank 0; torch is PyTorch's own. None: ring on gloo,
    torch on nccl."""
    metronome: NotOffered = None  # a metronome runs no layer, and what layers use is sharded


@dataclasses.dataclass
class BucketedZeroArgs(ZeroArgs):
    """Train a small GPT on the source of Python's standard library, with the training state sharded."""

    bucket_mb: float = 4.0
    """Size in MiB at which a bucket takes no more parameters. For the first bucket it is at most 0.25."""


class ZeroRun(Run):
    """One rank's side of a run whose optimizer has this rank's pieces."""

    _args: ZeroArgs
    _all_ranks_save = True

    def __init__(self, cluster: Cluster, args: ZeroArgs, run_mode: str, model: str = "gpt") -> None:
        super().__init__(cluster, args, run_mode, model)
        self.optimizer_class, self.options = OPTIMIZERS[args.optimizer]
        self.options = {**self.options, "lr": args.lr}

    def model(self) -> nn.Module:
        """Return the model with rank 0's buffers; the lesson makes its parameters equal."""
        module = super().model()
        for buffer in module.buffers():
            broadcast(buffer)
        return module

    def memory(
        self, stage: int, model: nn.Module, optimizer: torch.optim.Optimizer, flats: list[Flat]
    ) -> MemoryReport:
        """Return the report on this rank's memory; `flats` hold the parameters."""
        shares = [flat_share(flat, flat.itemsize, flat.is_trained) for flat in flats]
        inside = {parameter for flat in flats for parameter in flat.parameters}
        shares += [replicated(p) for p in model.parameters() if stage < 3 and p not in inside]
        return MemoryReport(
            self._cluster, stage, model, optimizer, shares, states_of(self.optimizer_class, **self.options)
        )

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> ShardedState:
        """Return what this rank owns of the parameters and of the optimizer's state."""
        pieces, rest = self._pieces_and_rest(model, optimizer)
        is_wrapped = isinstance(optimizer, ShardedOptimizer)
        return ShardedState(pieces, rest, optimizer, optimizer.gather_parameters if is_wrapped else None)

    def evaluate(self, step: int, model: nn.Module) -> None:
        """Compute the loss on held-out data as training.run does, and let FSDP2 free its root again."""
        super().evaluate(step, model)
        if isinstance(model, FSDPModule):
            model.reshard()  # the next forward would use a root that stays gathered, and not gather it again

    def _pieces_and_rest(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Piece], dict[str, Tensor]]:
        """Return, by name, the pieces that this rank has, and the tensors that all ranks have in full."""
        if isinstance(model, FSDPModule):
            return pieces_of_dtensors(model), dict(model.named_buffers())
        if not isinstance(optimizer, ShardedOptimizer):
            return model.pieces, dict(model.module.named_buffers())
        names = {parameter: name for name, parameter in model.named_parameters()}
        pieces = {names[piece.parameter]: piece for piece in optimizer.pieces}
        frozen = {name: p.detach() for name, p in model.named_parameters() if name not in pieces}
        return pieces, frozen | dict(model.named_buffers())

    def _made_with(self) -> dict[str, Any]:
        """Any stage goes on from any other's checkpoint, and on any number of ranks."""
        return super()._made_with() | {"run_mode": "zero", "optimizer": self._args.optimizer}


def recompute_blocks(module: nn.Module) -> None:
    """Keep only the inputs of the blocks in module lists; the backward computes what is in them again."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            for block in child:
                block.forward = functools.partial(recomputed, block.forward, use_reentrant=False)
        else:
            recompute_blocks(child)
