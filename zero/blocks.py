"""Divide a model into blocks, and the parameters of each block into units."""

from typing import Any

import torch
from torch import nn

from data_parallel.flat import fill
from zero.gradient_shard import InFlightReductions
from zero.unit import ShardedUnit

CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential


class ShardedBlock:
    """The parameters of a module, as units that are gathered and freed together.

    Its gradients are sent unit by unit, so that the first ones leave while others are computed. A unit has
    about `unit_bytes`, and parameters of one dtype that are all trained or all frozen.
    """

    def __init__(
        self,
        unit_class: type[ShardedUnit],
        name: str,
        parameters: list[nn.Parameter],
        unit_bytes: int,
        *options: Any,
    ) -> None:
        kinds: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
        for parameter in reversed(parameters):  # the order in which a backward computes their gradients
            kinds.setdefault((parameter.requires_grad, parameter.dtype), []).append(parameter)
        self.units = [
            unit_class(name, [kind[at] for at in positions], *options)
            for kind in kinds.values()
            for positions in fill(kind, unit_bytes, unit_bytes)
        ]
        self.trained = [unit for unit in self.units if unit.gradients is not None]
        self._sent = 0
        self.is_reduced = False
        self.turn: Any = None  # that of its last forward

    @property
    def num_bytes(self) -> int:
        """Return the size of the full gradients in bytes."""
        return sum(unit.gradients.num_bytes for unit in self.trained)

    def reduce_complete(self, reductions: InFlightReductions) -> bool:
        """Reduce the units that have all their gradients, in order. Return whether all units are reduced."""
        while self._sent < len(self.trained) and self.trained[self._sent].gradients.is_complete:
            reductions.start(self.trained[self._sent])
            self._sent += 1
        self.is_reduced = self._sent == len(self.trained)
        self._sent = 0 if self.is_reduced else self._sent
        return self.is_reduced

    def finish(self, reductions: InFlightReductions) -> None:
        """Free the block, and reduce its remaining units, with zeros for gradients that are missing."""
        self.free()
        if not self.is_reduced:
            self.is_reduced = True
            for unit in self.trained[self._sent :]:
                unit.gradients.fill_up(unit.shard.device)
                reductions.start(unit)
            self._sent = 0

    def start_gather(self) -> None:
        """Start to gather the parameters of the block."""
        for unit in self.units:
            unit.start_gather()

    def gather(self) -> None:
        """Wait until the block's parameters are full."""
        for unit in self.units:
            unit.gather()

    def free(self) -> None:
        """Free the memory of the full parameters."""
        for unit in self.units:
            unit.free()

    def free_trained(self) -> None:
        """Free the trained units; frozen ones may still have to pass a gradient on."""
        for unit in self.trained:
            unit.free()


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the members that have parameters, of each ModuleList, ModuleDict and Sequential in `module`.

    A list or dict has no forward of its own, so a member that is one is replaced by its own members. So is a
    Sequential of composite modules, while a Sequential of single layers is one block.
    """
    blocks: list[nn.Module] = []
    for child in module.children():
        if not isinstance(module, CONTAINERS) or _is_container_of_blocks(child):
            blocks += blocks_of(child)
        elif any(True for _ in child.parameters()):
            blocks.append(child)
    return list(dict.fromkeys(blocks))


def _is_container_of_blocks(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return any(True for member in module for _ in member.children())
    return isinstance(module, CONTAINERS)
