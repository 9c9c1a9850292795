"""Say what is gathered together: the units of a block, and which modules of a model are blocks."""

from typing import Any

import torch
from torch import nn

from data_parallel.flat import fill
from data_parallel.gradient_shard import InFlightReductions
from data_parallel.unit import ShardedUnit

CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential


class Block:
    """A module's parameters, which come and go together, and how far it is in this backward.

    Gradients are sent in units of `unit_bytes`, so that the first ones leave while others are computed.
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
        for parameter in reversed(parameters):  # as the backward comes to them
            kinds.setdefault((parameter.requires_grad, parameter.dtype), []).append(parameter)
        self.units = [
            unit_class(name, [kind[at] for at in positions], *options)
            for kind in kinds.values()
            for positions in fill(kind, unit_bytes, unit_bytes)
        ]
        self.trained = [unit for unit in self.units if unit.gradients is not None]
        self._sent = 0
        self.is_reduced = False
        self.turn: Any = None  # its last forward

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its full gradients."""
        return sum(unit.gradients.num_bytes for unit in self.trained)

    def reduce_complete(self, reductions: InFlightReductions) -> bool:
        """Reduce the units that have all their gradients, in order; True when that was the last one."""
        while self._sent < len(self.trained) and self.trained[self._sent].gradients.is_complete:
            reductions.start(self.trained[self._sent])
            self._sent += 1
        self.is_reduced = self._sent == len(self.trained)
        self._sent = 0 if self.is_reduced else self._sent
        return self.is_reduced

    def finish(self, reductions: InFlightReductions) -> None:
        """Free the block, and reduce what has not been: a gradient that is missing counts as zero."""
        self.free()
        if not self.is_reduced:
            self.is_reduced = True
            for unit in self.trained[self._sent :]:
                unit.gradients.fill_up(unit.shard.device)
                reductions.start(unit)
            self._sent = 0

    def start_gather(self) -> None:
        """Begin to gather the block's parameters."""
        for unit in self.units:
            unit.start_gather()

    def gather(self) -> None:
        """Wait until the block's parameters are full."""
        for unit in self.units:
            unit.gather()

    def free(self) -> None:
        """Give the memory of the block's parameters back."""
        for unit in self.units:
            unit.free()

    def free_trained(self) -> None:
        """Free what has its gradients; a frozen layer below may still pass one on."""
        for unit in self.trained:
            unit.free()


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the members of the containers in `module`, and of containers in these, that have parameters.

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
