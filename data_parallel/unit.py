"""Parameters that are full only while they are computed with: what stage 3 of ZeRO gathers and frees.

      shard, always here      [■■■■]
      all-gather              [■■■■|■■■■|■■■■|■■■■]     before the block's forward, and before its backward
      free                    [                   ]     after each

`param.data` is a view of the full memory. The graph that autograd builds must not keep that memory: within
`Notes` (data_parallel.freed) it keeps where in a unit each parameter was, and asks for it in the backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm import cost
from comm.collectives import Group, Work, all_gather, broadcast, default_pattern
from data_parallel.flat import Flat, Piece, fill
from data_parallel.freed import fill_in, free, stand_in
from data_parallel.gradient_shard import GradientShard, OnTheWay
from lab.ledger import Traffic
from training.gradient_part import GradientPart

CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential


class Unit:
    """Parameters, all of one dtype and all trained or all frozen, that are gathered and freed together.

    They become rank 0's. This rank's shard keeps their dtype; the full parameters, and gradients on the wire,
    have `compute_dtype` where both are floating-point numbers. Units that are full enter themselves in
    `full_units`, by the address of their memory.
    """

    def __init__(
        self,
        name: str,
        parameters: list[nn.Parameter],
        group: Group = None,
        pattern: str | None = None,
        compute_dtype: torch.dtype | None = None,
        full_units: dict[int, "Unit"] | None = None,
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
        self.dtype = compute_dtype if compute_dtype and first.is_floating_point() else first.dtype
        self.full: Tensor | None = None
        self._gathering: Work | None = None
        self._full_units = {} if full_units is None else full_units
        self._version = 0  # of the shard, when it was gathered
        self._stand_ins = [stand_in(self.shard, self.dtype, parameter.shape) for parameter in parameters]
        self._let_go()
        self.gradients: GradientShard | None = None
        if self.flat.is_trained:
            self.gradients = GradientShard(name, self.flat, self.shard.dtype, group, pattern, self.dtype)

    @property
    def is_full(self) -> bool:
        """Return whether the parameters can be computed with."""
        return self.full is not None and self._gathering is None

    @property
    def is_stale(self) -> bool:
        """Return whether the shard has changed since the parameters were gathered."""
        return self.full is not None and self._version != self.shard._version

    def start_gather(self) -> None:
        """Begin to gather the parameters, unless they are here or it has begun."""
        if self.full is not None:
            return
        self._version = self.shard._version
        self.full = torch.empty(self.flat.numel, dtype=self.dtype, device=self.shard.device)
        mine = self.full[self.flat.mine]
        mine.copy_(self.shard)
        self._gathering = all_gather(self.full, mine, group=self._group, async_op=True, pattern=self._pattern)

    def gather(self) -> None:
        """Have the full parameters."""
        self.start_gather()
        if self._gathering is not None:
            self._wait_for_gather()
            assert self.full is not None
            if self.full.data_ptr():
                self._full_units[self.full.data_ptr()] = self
            for piece, view in zip(self.pieces, self.flat.views(self.full), strict=True):
                fill_in(piece.parameter, view, piece.tensor.requires_grad)

    def free(self) -> None:
        """Give the full parameters' memory back."""
        if self.full is None:
            return
        if self._gathering is not None:
            self._wait_for_gather()
        else:
            self._full_units.pop(self.full.data_ptr(), None)
            self._let_go()
        self.full = None

    def _wait_for_gather(self) -> None:
        assert self._gathering is not None
        handle, self._gathering = self._gathering, None
        try:
            handle.wait()
        except BaseException:
            self.full = None  # the parameters are still freed: there is nothing to give back
            raise

    def _let_go(self) -> None:
        for parameter, data in zip(self.flat.parameters, self._stand_ins, strict=True):
            free(parameter, data)
        # What was saved outside of a `Notes` shows these very tensors: autograd must notice.
        torch.autograd.graph.increment_version(self.flat.parameters)

    def adopt_gradients(self) -> list[nn.Parameter]:
        """Go on from the pieces' gradients, which may be cleared or replaced; return what has none."""
        assert self.gradients is not None
        if all(piece.tensor.grad is None for piece in self.pieces):
            self.gradients.clear()
            return self.flat.parameters
        if self.gradients.shard is None:
            self.gradients.shard = torch.zeros_like(self.shard)
        cleared = []
        for piece, (_, part) in zip(self.pieces, self.flat.pieces(self.gradients.shard), strict=True):
            if piece.tensor.grad is None:
                part.zero_()
                cleared.append(piece.parameter)
            elif piece.tensor.grad.data_ptr() != part.data_ptr():
                part.copy_(piece.tensor.grad)
        return cleared

    def give_gradients(self) -> None:
        """Make the pieces' gradients what has added up."""
        if self.gradients is None or self.gradients.shard is None:
            return
        for piece, (_, part) in zip(self.pieces, self.flat.pieces(self.gradients.shard), strict=True):
            if piece.tensor.grad is None or piece.tensor.grad.data_ptr() != part.data_ptr():
                piece.tensor.grad = GradientPart.of(part, self._group, self._pattern)

    def traffic(self, gathers: int) -> Traffic:
        """What this rank sends for so many gathers and, if it is trained, a reduction."""
        pattern = self._pattern or default_pattern("all_gather", self._group)
        place = dist.get_world_size(self._group), dist.get_rank(self._group)
        ops = ["all_gather"] * gathers + ["reduce_scatter"] * (self.gradients is not None)
        sizes = self.flat.numel, self.dtype.itemsize
        return sum((cost.per_rank(op, pattern, *sizes, *place) for op in ops), Traffic())

    def full_master(self) -> list[Tensor]:
        """A copy of each parameter in the shard's precision; every rank must call it."""
        full = self.shard.new_empty(self.flat.numel)
        all_gather(full, self.shard, group=self._group, pattern=self._pattern)
        return self.flat.views(full)


class Block:
    """A module's parameters, which come and go together, and how far it is in this backward.

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
        self.is_reduced = False
        self.turn: Any = None  # its last forward

    @property
    def num_bytes(self) -> int:
        """The bytes of its gradients, when they are on their way."""
        return sum(gradients.num_bytes for _, gradients in self.trained)

    def send_complete(self, on_the_way: OnTheWay) -> bool:
        """Reduce the gradients of units that have all, in their order; True when that was the last unit."""
        while self._sent < len(self.trained) and self.trained[self._sent][1].is_complete:
            on_the_way.start(self.trained[self._sent][1])
            self._sent += 1
        if self._sent < len(self.trained):
            return False
        self._sent = 0
        return True

    def send_rest(self, on_the_way: OnTheWay) -> None:
        """Reduce what has not been sent yet, zeros for gradients that are not here."""
        for unit, gradients in self.trained[self._sent :]:
            gradients.fill_up(unit.shard.device)
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

    def free_trained(self) -> None:
        """Free what has its gradients; a frozen layer below may still pass one on."""
        for unit, _ in self.trained:
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
