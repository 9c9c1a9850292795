"""Parameters that are whole only while they are computed with: what stage 3 of ZeRO gathers and frees.

      shard, always here      [■■■■]
      all-gather              [■■■■|■■■■|■■■■|■■■■]     before the block's forward, and before its backward
      free                    [                   ]     after each

`param.data` is a view of the whole. What autograd has saved for the backward are the parameters themselves,
so it is enough that their memory is filled again by then: freeing gives the storage's bytes back and
leaves the tensors in place.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm import cost
from comm.collectives import Group, Work, all_gather, broadcast, default_pattern
from data_parallel.flat import Flat, Piece, fill
from data_parallel.gradient_shard import GradientShard, OnTheWay
from lab.ledger import Traffic


class Unit:
    """Parameters, all of one dtype and all trained or all frozen, that are gathered and freed together.

    They become rank 0's. This rank's shard keeps their dtype; the whole, and gradients on the wire, have
    `compute_dtype`.
    """

    def __init__(
        self,
        name: str,
        parameters: list[nn.Parameter],
        group: Group = None,
        pattern: str | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.name, self._group, self._pattern = name, group, pattern
        self.flat = Flat(parameters, dist.get_rank(group), dist.get_world_size(group))
        first = parameters[0]
        master = first.new_zeros(self.flat.numel)
        for parameter, view in zip(parameters, self.flat.views(master), strict=True):
            view.copy_(parameter.detach())
        broadcast(master, root=0, group=group)
        self.shard = master[self.flat.mine].clone()
        del master
        self.pieces = [
            Piece(parameter, start, nn.Parameter(part, requires_grad=parameter.requires_grad))
            for parameter, (start, part) in zip(parameters, self.flat.pieces(self.shard), strict=True)
        ]
        self.full = torch.empty(self.flat.numel, dtype=compute_dtype or first.dtype, device=first.device)
        self._num_bytes = self.full.nbytes
        self._gathering: Work | None = None
        self.is_whole = True
        self.renew()
        self.gradients: GradientShard | None = None
        if first.requires_grad:
            self.gradients = GradientShard(name, self.flat, self.shard.dtype, group, pattern, self.full.dtype)

    def start_gather(self) -> None:
        """Begin to make the parameters whole, unless they are or it has begun."""
        if self.is_whole or self._gathering is not None:
            return
        self.full.untyped_storage().resize_(self._num_bytes)
        mine = self.full[self.flat.mine]
        mine.copy_(self.shard)
        self._gathering = all_gather(self.full, mine, group=self._group, async_op=True, pattern=self._pattern)

    def gather(self) -> None:
        """Have the parameters whole."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering, self.is_whole = None, True

    def free(self) -> None:
        """Give the whole parameters' memory back."""
        if self._gathering is not None:
            self.gather()
        self.full.untyped_storage().resize_(0)
        self.is_whole = False

    def renew(self) -> None:
        """Free the whole parameters, though somebody may still look at their memory; between steps only."""
        self.full = torch.empty_like(self.full)
        for parameter, view in zip(self.flat.parameters, self.flat.views(self.full), strict=True):
            parameter.data = view
        self.free()

    def traffic(self, gathers: int) -> Traffic:
        """What this rank sends for so many gathers and, if it is trained, a reduction."""
        pattern = self._pattern or default_pattern("all_gather", self._group)
        place = dist.get_world_size(self._group), dist.get_rank(self._group)
        ops = ["all_gather"] * gathers + ["reduce_scatter"] * (self.gradients is not None)
        sizes = self.full.numel(), self.full.itemsize
        return sum((cost.per_rank(op, pattern, *sizes, *place) for op in ops), Traffic())

    def whole_master(self) -> list[Tensor]:
        """A copy of each parameter in the shard's precision; every rank must call it."""
        full = self.shard.new_empty(self.flat.numel)
        all_gather(full, self.shard, group=self._group, pattern=self._pattern)
        return self.flat.views(full)


class Block:
    """A module's parameters, which come and go together, and how far it is in this microbatch.

    Gradients are sent in units of `unit_bytes`, so that the first ones leave while others are computed.
    """

    def __init__(self, name: str, parameters: list[nn.Parameter], unit_bytes: int, *options: Any) -> None:
        kinds: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
        for parameter in reversed(parameters):  # as the backward comes to them
            kinds.setdefault((parameter.requires_grad, parameter.dtype), []).append(parameter)
        self.units = [
            Unit(name, [kind[at] for at in positions], *options)
            for kind in kinds.values()
            for positions in fill(kind, unit_bytes, unit_bytes)
        ]
        self.trained = [(unit, unit.gradients) for unit in self.units if unit.gradients is not None]
        self._sent = 0
        self.runs = 0  # forwards
        self.turns = 0  # of these, whose backward has begun
        self.is_reduced = False

    @property
    def is_in_backward(self) -> bool:
        """Whether what runs its forward now is a recomputation."""
        return self.turns > 0

    @property
    def num_bytes(self) -> int:
        """Of its gradients, when they are on their way."""
        return sum(gradients.num_bytes for _, gradients in self.trained)

    def send_complete(self, on_the_way: OnTheWay) -> bool:
        """Reduce the gradients of units that have all, in their order; True when that was the last unit."""
        while self._sent < len(self.trained) and self.trained[self._sent][1].is_complete:
            on_the_way.start(self.trained[self._sent][1])
            self._sent += 1
        return self._sent == len(self.trained)

    def send_rest(self, on_the_way: OnTheWay) -> None:
        """Reduce what has not been sent yet, zeros for gradients that are not here."""
        for unit, gradients in self.trained[self._sent :]:
            gradients.fill_up(unit.full.device)
            on_the_way.start(gradients)
        self._sent = 0

    def start_gather(self) -> None:
        for unit in self.units:
            unit.start_gather()

    def gather(self) -> None:
        for unit in self.units:
            unit.gather()

    def free(self) -> None:
        for unit in self.units:
            unit.free()


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost module lists."""
    if isinstance(module, nn.ModuleList):
        return [block for block in module if any(True for _ in block.parameters())]
    return [block for child in module.children() for block in blocks_of(child)]
