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
equal length need padding (shards.py).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lab.launch.errors import WorkbookError
from lab.trace.memory import live_bytes, saved_activations
from zero.shards import ParameterShard

FORMULAS = ("P+G+O", "P+G+O/n", "P+G/n+O/n", "(P+G+O)/n")  # by stage


@dataclass(frozen=True)
class Held:
    """The sizes in bytes of the parameters, the gradients and the optimizer's state."""

    parameters: float
    gradients: float
    optimizer_state: float


@dataclass(frozen=True)
class Share:
    """This rank's share of a parameter: it owns `mine` of its `full` numbers."""

    full: int
    mine: int
    itemsize: int = 4
    trained: bool = True


def shares_of(model: nn.Module, shards: Sequence[ParameterShard]) -> list[Share]:
    """Return this rank's share of each parameter; it has all of a parameter of which there is no shard."""
    owned = {shard.parameter: shard.tensor for shard in shards}
    pairs = [(parameter, owned.get(parameter, parameter)) for parameter in model.parameters()]
    return [Share(full.numel(), mine.numel(), mine.itemsize, mine.requires_grad) for full, mine in pairs]


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


@dataclass(frozen=True)
class Measured(Held):
    """The bytes that a rank holds, by kind of tensor, and the activations of a forward."""

    step_counters: int  # AdamW counts its steps, for each parameter
    other_tensors: int
    activations: int  # 0 if no forward was watched


NOTHING = Held(0, 0, 0)


class MemoryReport:
    """Measures what a rank's training holds: `should` is what it should hold, without padding.

    memory = MemoryReport(model, optimizer, owned(stage, shares_of(model, shards), states))
    with memory.forward():                       # counts the first forward's activations
        loss = loss_of(model(x), y)
    ...
    run.finish(model, **memory.fields())         # after a step, before its gradients are cleared
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, should: Held = NOTHING) -> None:
        self._model, self._optimizer, self._should = model, optimizer, should
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

    def measure(self) -> Measured:
        """Return the bytes that are held now."""
        groups = self._optimizer.param_groups
        parameters = [*self._of_modules(), *(p for group in groups for p in group["params"])]
        state = [entry for state in self._optimizer.state.values() for entry in state.items()]
        sizes = live_bytes(
            {
                "parameters": parameters,
                "gradients": [parameter.grad for parameter in parameters],
                "optimizer_state": [one for name, one in state if isinstance(one, Tensor) and name != "step"],
                "step_counters": [one for name, one in state if isinstance(one, Tensor) and name == "step"],
            }
        )
        other = sizes.pop("other")
        return Measured(**sizes, other_tensors=other, activations=self._activations or 0)

    def fields(self) -> dict[str, int]:
        """Return what this rank holds and should hold. What it holds beyond the formula is padding."""
        held = asdict(self.measure())
        should = asdict(self._should)
        padding = sum(held[name] - size for name, size in should.items())
        return {
            **{f"{name}_bytes": size for name, size in held.items()},
            "padding_bytes": padding,
            **{f"formula_{name}_bytes": size for name, size in should.items()},
        }
