"""Compare the memory that a rank should hold at each stage of ZeRO with the memory that it does hold.

                     parameters    gradients    optimizer state
      0, no ZeRO         P             G               O        one process; each rank of plain data parallel
      1                  P             G               O/n
      2                  P             G/n             O/n
      3                  P/n           G/n             O/n

The table is for n ranks, in bytes. O is 2P for AdamW, P for SGD with momentum, and 0 for plain SGD.
Activations are not in the table, nor is what lives for a short time only: gathered parameters, and buckets
that are being sent. After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020, https://arxiv.org/abs/1910.02054, figure 1.

A rank cannot own a fraction of a number, so a shard may differ from an n-th by a few numbers, and shards of
equal length need padding (shards.py). The report counts both, to the byte.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from comm.exchange import exchange
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.trace.memory import live_bytes, saved_activations
from lab.trace.meter import peak_memory
from lab.units import show_bytes
from training.arguments import AccumulationArgs, ClipArgs, NotOffered, ShardPattern
from zero.shards import FlatLayout

# By the name of --optimizer: its class, its options, and how many numbers it keeps for each trained number.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any], int]] = {
    "adamw": (torch.optim.AdamW, {}, 2),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, 1),
    "sgd": (torch.optim.SGD, {}, 0),
}
FORMULAS = ("P+G+O", "P+G+O/n", "P+G/n+O/n", "(P+G+O)/n")  # by stage


@dataclass(frozen=True)
class Held:
    """The sizes in bytes of the parameters, the gradients and the optimizer's state."""

    parameters: float
    gradients: float
    optimizer_state: float


@dataclass(frozen=True)
class Share:
    """This rank's share of some parameters: it owns `mine` of their `full` numbers.

    Its shard has `padding` more numbers, and a tensor of all shards `full_padding` more.
    """

    full: int
    mine: int
    padding: int = 0
    full_padding: int = 0
    itemsize: int = 4
    trained: bool = True


def shares_of(model: nn.Module, layouts: Sequence[FlatLayout]) -> list[Share]:
    """Return this rank's share of each flat tensor; it has all of the frozen parameters in none of them."""
    shares = []
    for layout in layouts:
        numel = layout.numel - layout.padding
        mine = max(0, min(layout.mine.stop, numel) - layout.mine.start)
        padding = layout.mine.stop - layout.mine.start - mine
        shares.append(Share(numel, mine, padding, layout.padding, layout.itemsize, layout.is_trained))
    inside = {parameter for layout in layouts for parameter in layout.parameters}
    outside = [parameter for parameter in model.parameters() if parameter not in inside]
    return shares + [Share(p.numel(), p.numel(), itemsize=p.itemsize, trained=False) for p in outside]


def formula(stage: int, full: Held, ranks: int) -> Held:
    """Return what one of `ranks` ranks holds with a stage of ZeRO, if one process holds `full`."""
    if stage not in range(len(FORMULAS)):
        raise WorkbookError(
            f"ZeRO has the stages 1, 2 and 3, and 0 is without it; there is no stage {stage}."
        )
    return Held(
        full.parameters / (ranks if stage >= 3 else 1),
        full.gradients / (ranks if stage >= 2 else 1),
        full.optimizer_state / (ranks if stage >= 1 else 1),
    )


def of_one_process(shares: Sequence[Share], states: int) -> Held:
    """Return P, G and O; the optimizer keeps `states` numbers for each trained one."""
    trained = sum(share.full * share.itemsize for share in shares if share.trained)
    return Held(sum(share.full * share.itemsize for share in shares), trained, states * trained)


def owned(stage: int, shares: Sequence[Share], states: int) -> Held:
    """Return what this rank should hold, to the byte, without padding. The mean over ranks is the formula."""
    full = of_one_process(shares, states)
    mine = sum(share.mine * share.itemsize for share in shares)
    trained = sum(share.mine * share.itemsize for share in shares if share.trained)
    return Held(
        mine if stage >= 3 else full.parameters,
        trained if stage >= 2 else full.gradients,
        states * trained if stage >= 1 else full.optimizer_state,
    )


def padding_of(stage: int, shares: Sequence[Share]) -> Held:
    """Return the padding of what this rank holds. Shards of parameters and their state have none."""

    def padding(shares: Iterable[Share], is_divided: bool) -> int:
        return sum((s.padding if is_divided else s.full_padding) * s.itemsize for s in shares)

    if stage == 0:
        return Held(0, 0, 0)
    return Held(padding(shares, stage >= 3), padding((s for s in shares if s.trained), stage >= 2), 0)


def _state_of(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Return the optimizer's state, and its step counters, which are one number for each parameter."""
    entries = [entry for state in optimizer.state.values() for entry in state.items()]
    tensors = [(name, value) for name, value in entries if isinstance(value, Tensor)]
    state = [value for name, value in tensors if name != "step"]
    return state, [value for name, value in tensors if name == "step"]


@dataclass(frozen=True)
class Measured:
    """The bytes that a rank holds, by kind of tensor, with activations of a forward, and the peak."""

    parameters: int
    gradients: int
    optimizer_state: int
    step_counters: int
    other_tensors: int
    activations: int  # 0 if no forward was watched
    peak: int  # 0 where it is not known

    def amiss(self, should: Held, padding: Held) -> int:
        """Return by how many bytes the first three differ from what they should be."""
        held = Held(self.parameters, self.gradients, self.optimizer_state)
        triples = zip(astuple(held), astuple(should), astuple(padding), strict=True)
        return sum(abs(h - s - p) for h, s, p in triples)


class MemoryReport:
    """Measures the memory of one rank's training, and compares it with the formula for `shares` and `states`.

        memory = MemoryReport(cluster, stage, model, optimizer, shares, states)
        with memory.forward():                       # counts the first forward's activations
            loss = loss_of(model(x), y)
        ...
        run.finish(model, **memory.finish())         # after a step, before its gradients are cleared

    Parameters are those of the optimizer and of all modules; gradients are their `grad`.
    """

    def __init__(
        self,
        cluster: Cluster,
        stage: int,
        model: nn.Module,
        optimizer: Optimizer,
        shares: Sequence[Share],
        states: int,
    ) -> None:
        formula(stage, Held(0, 0, 0), cluster.world_size)  # raises if there is no such stage
        self._cluster, self._stage, self._model, self._optimizer = cluster, stage, model, optimizer
        self._shares, self._states = shares, states
        self._activations: int | None = None

    def _of_modules(self) -> Iterator[Tensor]:
        for module in self._model.modules():
            for parameter in module.parameters(recurse=False):
                # Where stage 3 has freed a parameter, one number stands for all of its.
                if isinstance(parameter, DTensor) or parameter.untyped_storage().nbytes() >= parameter.nbytes:
                    yield parameter

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Count the activations of the first forward that runs inside; later ones run as they are."""
        if self._activations is not None:
            yield
            return
        with saved_activations(self._of_modules) as saved:
            yield
        self._activations = saved.bytes

    def measure(self, aside: Iterable[Tensor] = ()) -> Measured:
        """Return the bytes that are held now, without the tensors `aside`, such as the data."""
        peak = peak_memory(self._cluster.device) or 0  # before the measurement adds to it
        groups = self._optimizer.param_groups
        parameters = [*self._of_modules(), *(p for group in groups for p in group["params"])]
        state, steps = _state_of(self._optimizer)
        sizes = live_bytes(
            {
                "parameters": parameters,
                "gradients": [parameter.grad for parameter in parameters],
                "optimizer_state": state,
                "step_counters": steps,
                "aside": aside,
            }
        )
        return Measured(
            sizes["parameters"],
            sizes["gradients"],
            sizes["optimizer_state"],
            sizes["step_counters"],
            sizes["other"],
            self._activations or 0,
            peak,
        )

    def finish(self, aside: Iterable[Tensor] = (), as_json: bool = False) -> dict[str, int]:
        """Print a table of all ranks on rank 0, and return this rank's fields; all ranks must call it.

        `formula_..._bytes` is the formula for this rank to the byte, and `padding_bytes` what shards of
        equal length cost beyond it. Together they are what was measured, unless there is a tensor too many
        or too few.
        """
        measured, cluster = self.measure(aside), self._cluster
        should = owned(self._stage, self._shares, self._states)
        padding = padding_of(self._stage, self._shares)
        row = [*astuple(measured), sum(astuple(padding)), measured.amiss(should, padding)]
        rows = exchange(row)
        if cluster.is_main:
            Console(stderr=as_json).print(self._table(rows), self._verdict(rows), sep="\n")
        return {
            "parameters_bytes": measured.parameters,
            "gradients_bytes": measured.gradients,
            "optimizer_state_bytes": measured.optimizer_state,
            "step_counters_bytes": measured.step_counters,
            "other_tensors_bytes": measured.other_tensors,
            "activations_bytes": measured.activations,
            "padding_bytes": sum(astuple(padding)),
            "formula_parameters_bytes": should.parameters,
            "formula_gradients_bytes": should.gradients,
            "formula_optimizer_state_bytes": should.optimizer_state,
        }

    def _table(self, rows: list[list[int]]) -> Table:
        names = ("rank", "parameters", "gradients", "optimizer", "other", "activations", "peak")
        table = Table(*names, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for rank, (parameters, gradients, state, _, other, activations, peak, *_) in enumerate(rows):
            sizes = [show_bytes(size) for size in (parameters, gradients, state, other, activations)]
            seen = show_bytes(peak) if peak else "-"
            table.add_row(str(rank), *sizes, seen, end_section=rank + 1 == len(rows))
        full, ranks = of_one_process(self._shares, self._states), len(rows)
        for stage in sorted({self._stage, 0}, reverse=True):
            sizes = astuple(formula(stage, full, ranks))
            table.add_row(FORMULAS[stage], *(show_bytes(size) for size in sizes))
        return table

    def _verdict(self, rows: list[list[int]]) -> str:
        padding, amiss, steps = (sum(row[i] for row in rows) for i in (-2, -1, 3))
        if amiss:
            return f"{amiss:,} bytes of parameters, gradients and optimizer state differ from the formula."
        return (
            "Parameters, gradients and optimizer state are equal to the formula to the byte, "
            f"with {padding:,} bytes of padding; step counters take {steps:,} more (all ranks)."
        )


@dataclass
class ZeroArgs(ClipArgs, AccumulationArgs):
    """Train a small GPT on the source of Python's standard library, with the training state sharded."""

    optimizer: Literal["adamw", "momentum", "sgd"] = "adamw"
    """Optimizer. Its state is twice the parameters' size (adamw), the same size (momentum) or empty (sgd)."""
    pattern: Literal[ShardPattern, None] = None
    """Algorithm of the collectives: who sends what to whom. ring is the textbook's; pipelined_ring sends each
    chunk in pieces; tree sends all data through rank 0; torch is PyTorch's own. None: ring on gloo,
    torch on nccl."""
    metronome: NotOffered = None  # a metronome runs no layer, and what layers use is sharded

    def optimizer_class(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class of the optimizer, and its options."""
        optimizer_class, options, _ = OPTIMIZERS[self.optimizer]
        return optimizer_class, {**options, "lr": self.lr}

    @property
    def states(self) -> int:
        """Return how many numbers the optimizer keeps for each trained number."""
        return OPTIMIZERS[self.optimizer][2]
