"""Hold the parts of a unit of stage 3: its layout, shard, gradients, and stand-ins for freed parameters.

How a unit is gathered, freed and reduce-scattered is in train_zero3.py. While a unit is full, `param.data`
is a view of its memory. Autograd must not save such views, or the memory could not be freed: it saves notes
(freed.py).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import Group, Work, all_gather, broadcast
from comm.cost import expected_traffic
from data_parallel.flat import Flat, Piece
from lab.trace.ledger import Traffic
from training.gradient_part import GradientPart
from zero.freed import fill_in, free, stand_in
from zero.gradient_shard import GradientShard


class ShardedUnit:
    """Parameters of one dtype, all trained or all frozen, that are gathered and freed together.

    Their values become rank 0's. The shard keeps their dtype. Full parameters, and gradients while they are
    sent, have `compute_dtype` if the dtype is a floating-point one. A unit that is full is in `full_units`,
    by the address of its memory.
    """

    def __init__(
        self,
        name: str,
        parameters: list[nn.Parameter],
        group: Group = None,
        pattern: str | None = None,
        compute_dtype: torch.dtype | None = None,
        full_units: dict[int, "ShardedUnit"] | None = None,
    ) -> None:
        self.name, self.group, self.pattern = name, group, pattern
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
        self._reducing: tuple[Tensor, Work] | None = None
        self._full_units = {} if full_units is None else full_units
        self._version = 0  # of the shard, when it was gathered
        self._stand_ins = [stand_in(self.shard, self.dtype, parameter.shape) for parameter in parameters]
        self._let_go()
        self.gradients: GradientShard | None = None
        if self.flat.is_trained:
            self.gradients = GradientShard(self.flat, self.shard.dtype, self.dtype)

    @property
    def is_full(self) -> bool:
        """Return whether the full parameters are there, so that the module can compute."""
        return self.full is not None and self._gathering is None

    @property
    def is_stale(self) -> bool:
        """Return whether the shard has changed since the parameters were gathered."""
        return self.full is not None and self._version != self.shard._version

    def _show(self) -> None:
        """Make the parameters views of `full`, and add the unit to those that are full."""
        assert self.full is not None
        if self.full.data_ptr():
            self._full_units[self.full.data_ptr()] = self
        for piece, view in zip(self.pieces, self.flat.views(self.full), strict=True):
            fill_in(piece.parameter, view, piece.tensor.requires_grad)

    def _hide(self) -> None:
        """Make the parameters stand-ins, so that nothing refers to `full`."""
        assert self.full is not None
        self._full_units.pop(self.full.data_ptr(), None)
        self._let_go()

    def _let_go(self) -> None:
        for parameter, data in zip(self.flat.parameters, self._stand_ins, strict=True):
            free(parameter, data)
        # Autograd must notice it if tensors that were saved outside of `Notes` are used now.
        torch.autograd.graph.increment_version(self.flat.parameters)

    def adopt_gradients(self) -> list[nn.Parameter]:
        """Adopt the pieces' gradients, which the program may have changed; return parameters without one."""
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
        """Set the `grad` of each piece to its part of the gradients that have added up."""
        if self.gradients is None or self.gradients.shard is None:
            return
        for piece, (_, part) in zip(self.pieces, self.flat.pieces(self.gradients.shard), strict=True):
            if piece.tensor.grad is None or piece.tensor.grad.data_ptr() != part.data_ptr():
                piece.tensor.grad = GradientPart.of(part, self.group, self.pattern)

    def traffic(self, gathers: int) -> Traffic:
        """Return this rank's expected traffic for `gathers` gathers and, if it is trained, a reduction."""
        ops = ["all_gather"] * gathers + ["reduce_scatter"] * (self.gradients is not None)
        sizes = self.flat.numel, self.dtype.itemsize
        return sum((expected_traffic(op, self.pattern, *sizes, self.group) for op in ops), Traffic())

    def full_master(self) -> list[Tensor]:
        """Return a full copy of each parameter in the dtype of the shard; every rank must call it."""
        full = self.shard.new_empty(self.flat.numel)
        all_gather(full, self.shard, group=self.group, pattern=self.pattern)
        return self.flat.views(full)
