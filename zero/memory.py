"""Compute what a rank should hold at each stage of ZeRO; the report of a run has it beside what it holds.

                     parameters    gradients    optimizer state
      0, no ZeRO         P             G               O        one process; each rank of plain data parallel
      1                  P             G               O/n
      2                  P             G/n             O/n
      3                  P/n           G/n             O/n

The table is for n ranks, in bytes. O is 2P for AdamW, P for SGD with momentum, and 0 for plain SGD.
Activations are not in the table, nor is what lives for a short time only: gathered parameters, and buckets
that are being sent. A shard may differ from an n-th by a few numbers, and is padded (shards.py). After
Rajbhandari et al., "ZeRO", 2020, https://arxiv.org/abs/1910.02054, figure 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

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
