"""Refuse changes to a sharded model, and penalties on its shards, that would train it wrongly in silence."""

from typing import NoReturn

from torch import Tensor, nn

from lab.launch.errors import WorkbookError
from zero.unit import ShardedUnit


class Wrapped:
    """Remembers the parameters and modules of a wrapped module: what is added later has no shard."""

    def __init__(
        self, model: nn.Module, names: dict[nn.Parameter, list[str]], units: list[ShardedUnit]
    ) -> None:
        self._names, self._pieces = names, [piece for unit in units for piece in unit.pieces]
        self._modules = [
            (name, module, [*module._parameters.items()], [*module._modules.items()])
            for name, module in model.named_modules()
        ]
        self._memory = [piece.tensor.data_ptr() for piece in self._pieces]
        self._frozen = [piece for unit in units if unit.gradients is None for piece in unit.pieces]

    def refuse_changes(self) -> None:
        """Raise WorkbookError, before a forward, for parameters that would not be trained."""
        for prefix, module, parameters, modules in self._modules:
            for were, are in ((parameters, module._parameters), (modules, module._modules)):
                if len(were) != len(are) or not all(are.get(name) is value for name, value in were):
                    names = [name for name, value in were if are.get(name) is not value]
                    names += [name for name in are if name not in dict(were)]
                    self._refuse(f"{prefix}.{names[0]}".strip("."), "was added, replaced or removed")
        for piece, memory in zip(self._pieces, self._memory, strict=True):
            if piece.tensor.data_ptr() != memory:
                self._refuse(self._names[piece.parameter][0], "was given other memory")
        for piece in self._frozen:
            if piece.tensor.requires_grad:
                self._refuse(self._names[piece.parameter][0], "was unfrozen")

    @staticmethod
    def _refuse(name: str, what: str) -> NoReturn:
        name = name.removeprefix("module.")
        raise WorkbookError(
            f"{name} {what} after the module was sharded, and would not be trained: change the module "
            "first, then wrap it and give parameters() to the optimizer."
        )


def refuse_penalties(names: dict[nn.Parameter, list[str]], units: list[ShardedUnit]) -> None:
    """Raise WorkbookError when a backward reaches a piece: each rank would add only its part of a penalty."""

    def refuse(gradient: Tensor, name: str) -> NoReturn:
        raise WorkbookError(
            f"The loss uses this rank's shard of {name}: compute a penalty inside the model's forward, where "
            "its parameters are full, or give the optimizer a weight_decay."
        )

    for unit in units:
        for piece in unit.pieces:
            if piece.tensor.requires_grad:
                name = names[piece.parameter][0]
                piece.tensor.register_hook(lambda gradient, name=name: refuse(gradient, name))
