"""Give a sharded module the interface of a module: names, dtypes, saving, expected traffic, and refusals.

How the shards are gathered and freed is in train_zero3.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import Group, broadcast
from comm.cost import expected_traffic
from data_parallel.flat import Piece
from lab.launch.errors import WorkbookError
from lab.trace.ledger import Traffic
from lab.units import MIB
from zero.blocks import ShardedBlock, blocks_of
from zero.gradient_shard import InFlightReductions
from zero.unit import ShardedUnit
from zero.wrapped import Wrapped, refuse_penalties


class ShardedModule(nn.Module):
    """A wrapper of `module` whose `parameters()` are this rank's pieces.

    It refuses, with a WorkbookError: `state_dict`, `load_state_dict` and `deepcopy`; moving or casting the
    wrapped model; looking at a parameter outside of a forward and of `gathered()`; training parameters that
    were added, replaced or unfrozen after wrapping; an optimizer over the module's own parameters; a loss
    that uses the pieces.

    Sparse gradients become dense. Buffers become rank 0's when the module is wrapped, and are not sent
    again (DDP sends them before each forward); `full_state_dict` returns rank 0's.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        pattern: str | None,
        compute_dtype: torch.dtype | None,
        blocks: list[nn.Module] | None,
        unit_mb: float,
        reshard_after_forward: bool,
        unit_class: type[ShardedUnit],
    ) -> None:
        super().__init__()
        self.module, self.group, self.pattern = module, group, pattern
        self._compute_dtype, self._reshards = compute_dtype, reshard_after_forward
        for buffer in module.buffers():
            broadcast(buffer, root=0, group=group)
        self._names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(parameter, []).append(name)
        self._output_dtype = next((p.dtype for p in self._names if p.is_floating_point()), None)
        self._block_modules = blocks_of(module) if blocks is None else blocks
        # Parameters that two blocks share, or that are in no block, belong to the root.
        users = [set(block.parameters()) for block in self._block_modules]
        shared = {p for p in self._names if sum(p in used for used in users) != 1}
        own = [[p for p in block.parameters() if p not in shared] for block in self._block_modules]
        self._full_units: dict[int, ShardedUnit] = {}
        options = int(unit_mb * MIB), group, pattern, compute_dtype, self._full_units
        self.root = ShardedBlock(unit_class, "root", [p for p in self._names if p in shared], *options)
        self.blocks = [
            ShardedBlock(unit_class, f"block {i}", parameters, *options) for i, parameters in enumerate(own)
        ]
        self._all = [self.root, *self.blocks]
        self._place: dict[nn.Parameter, tuple[ShardedBlock, ShardedUnit, int]] = {}  # where its gradient goes
        for block in self._all:
            for unit in block.trained:
                for position, piece in enumerate(unit.pieces):
                    self._place[piece.parameter] = block, unit, position
        self._reductions = InFlightReductions(2 * max(block.num_bytes for block in self._all))
        refuse_penalties(self._names, self.units)
        self._wrapped = Wrapped(self, self._names, self.units)

    @property
    def units(self) -> list[ShardedUnit]:
        """Return the units of all blocks."""
        return [unit for block in (self.root, *self.blocks) for unit in block.units]

    @property
    def pieces(self) -> dict[str, Piece]:
        """Return this rank's piece of each parameter, by name; a tied parameter has its first name."""
        owned = {piece.parameter: piece for unit in self.units for piece in unit.pieces}
        return {names[0]: owned[parameter] for parameter, names in self._names.items()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the pieces, each with the name of its parameter."""
        for name, piece in self.pieces.items():
            yield f"{prefix}.{name}" if prefix else name, piece.tensor

    def _as_computed(self, tensor: Tensor) -> Tensor:
        is_cast = self._compute_dtype is not None and tensor.is_floating_point()
        return tensor.to(self._compute_dtype) if is_cast else tensor

    def _as_given(self, tensor: Tensor) -> Tensor:
        is_cast = self._compute_dtype is not None and tensor.dtype == self._compute_dtype
        return tensor.to(self._output_dtype) if is_cast else tensor

    def _free_all(self) -> None:
        for block in self._all:
            block.free()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Yield the module with all its parameters full, in the dtype of the forward, for reading only."""
        for unit in self.units:
            unit.gather()
        versions = {parameter: parameter._version for parameter in self._names}
        try:
            yield self.module
            for parameter, version in versions.items():
                if parameter._version != version:
                    raise WorkbookError(
                        f"{self._names[parameter][0]} was changed inside gathered(), and only shards are "
                        "kept: initialise and load before wrapping, or change what parameters() yields."
                    )
        finally:
            for unit in self.units:
                unit.free()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return on rank 0 the state dict of the plain module, on the CPU, and on other ranks an empty dict.

        One unit is full at a time. Every rank must call it. Buffers are rank 0's.
        """
        result: dict[str, Tensor] = {}
        is_main = dist.get_rank(self.group) == 0
        for unit in self.units:
            for piece, full in zip(unit.pieces, unit.full_master(), strict=True):
                if is_main:
                    result |= dict.fromkeys(self._names[piece.parameter], full.cpu().clone())
        if is_main:
            result |= {name: buffer.cpu().clone() for name, buffer in self._saved_buffers()}
        return result

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raise WorkbookError: call full_state_dict instead."""
        raise WorkbookError(
            "state_dict() would hold this rank's shards only: call full_state_dict() on all ranks and save "
            "what rank 0 gets, or write shards with zero.sharded_checkpoint."
        )

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raise WorkbookError: load a module before it is wrapped."""
        raise WorkbookError(
            "A state dict has full parameters, and every rank has only shards: load it into the module "
            "before wrapping, or read shards with zero.sharded_checkpoint."
        )

    def __getstate__(self) -> NoReturn:
        raise WorkbookError(
            "A sharded model can be neither copied nor pickled, because each rank has only shards: copy the "
            "module before wrapping, or load full_state_dict() into another module."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Raise WorkbookError if `to()`, `double()` or the like would change a tensor."""
        if any(fn(tensor) is not tensor for tensor in (*self.parameters(), *self.buffers())):
            raise WorkbookError(
                "A sharded model is neither moved nor cast: do that to the module before wrapping; "
                "compute_dtype sets the dtype of the forward."
            )
        return self

    def _refuse_look(self, parameter: nn.Parameter) -> NoReturn:
        raise WorkbookError(
            f"{self._names[parameter][0]} is sharded, and full only in a forward or backward: look at it "
            "inside gathered(), train and freeze what parameters() yields, save with full_state_dict(); "
            "initialise, load, cast and copy the module before wrapping."
        )

    def traffic_per_step(self, microbatches: int = 1, is_clipped: bool = False) -> Traffic:
        """Return this rank's expected traffic for a step in which each microbatch runs every block once.

        Each microbatch gathers and reduces. The flags of used parameters are exchanged once.
        """
        gathers = dict.fromkeys(self.blocks, 2 if self._reshards else 1) | {self.root: 1}
        traffics = [
            unit.traffic(times) for block, times in gathers.items() for unit in block.units
        ] * microbatches
        for numel, itemsize in [(len(self._place) + 2, 8)] + [(1, 8)] * is_clipped:
            traffics.append(expected_traffic("all_reduce", self.pattern, numel, itemsize, self.group))
        return sum(traffics, Traffic())
