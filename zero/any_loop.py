"""Notice where each backward of stage 3 begins and ends, in any order of forwards and backwards.

      forward ─► turns of blocks ─► backward begins ─► ... ─► backward ends ─► gradients of pieces

A backward begins when the first gradient reaches the model. Autograd calls back when it ends, and then the
gradients that this rank still misses are sent as zeros. So all ranks send the same messages in each
backward. It does not matter how many backwards there are, which forwards they follow, or whether an exception
ended the last one.
"""

import contextlib
import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from comm.collectives import all_reduce
from lab.launch.errors import WorkbookError
from lab.models.nested import tensors_in
from training.clipping import clip_grad_norm_
from zero.blocks import ShardedBlock
from zero.freed import is_in_a_backward
from zero.sharded_module import ShardedModule
from zero.unit import ShardedUnit


@dataclass(eq=False)
class Turn:
    """One forward of a block, or another use of its parameters (`is_use`), until its backward has ended."""

    block: ShardedBlock
    is_use: bool = False
    has_begun: bool = False


class AnyLoop(ShardedModule):
    """The part of a sharded module that tracks forwards and backwards."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns: list[Turn] = []
        self._late: list[tuple[ShardedUnit, int, Tensor]] = []
        self._used: set[nn.Parameter] = set()
        self._order_checksum = 0  # of the blocks that ran since gradients were synchronised, in order
        self._is_in_forward = self._is_in_backward = self._awaits_backward = False
        self._is_synced = True
        for block in self._all:
            for unit in block.units:
                for piece in unit.pieces:
                    touch = functools.partial(self._on_touch, piece.parameter, block, unit)
                    piece.parameter.on_touch = touch

    @contextlib.contextmanager
    def _in_forward(self) -> Iterator[None]:
        """Check before the forward that it can be trained, and free all parameters if it fails."""
        if _is_trained():
            self._wrapped.refuse_changes()
            self._give_up_backward()
            self._awaits_backward = True
        self._free_stale()
        self._is_in_forward = True
        try:
            yield
        except BaseException:
            self._free_all()
            raise
        finally:
            self._is_in_forward = False

    def _begin_turn(self, block: ShardedBlock) -> None:
        """Note that a block runs its forward, so that its backward is recognised."""
        if not torch.is_grad_enabled():
            return
        if not self._is_in_forward:
            raise WorkbookError("A block was called by itself: call the model, which gathers what it needs.")
        block.turn = Turn(block)
        self._turns.append(block.turn)
        number = self.blocks.index(block).to_bytes(4)
        self._order_checksum = zlib.crc32(number, self._order_checksum)

    def _await_backward(self, output: Any) -> None:
        """Begin the backward when its first gradient reaches the output of the model."""
        for tensor in tensors_in(output) if _is_trained() else ():
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _on_touch(self, parameter: nn.Parameter, block: ShardedBlock, unit: ShardedUnit) -> None:
        """Gather a freed parameter that is used outside of its block's forward, or refuse the use."""
        if is_in_a_backward():
            self._begin_backward()
        elif not self._is_in_forward:
            self._refuse_look(parameter)
        elif torch.is_grad_enabled():
            self._turns.append(Turn(block, is_use=True))
        unit.gather()

    def _free_touched(self) -> None:
        """Free, after a forward, the blocks that no hook has freed."""
        for turn in self._turns:
            if turn.is_use and self._reshards:
                turn.block.free()
        if not self._awaits_backward:
            self._free_all()

    def _begin_backward(self, *_: Any) -> None:
        if not self._is_in_backward and is_in_a_backward():
            self._is_in_backward, self._is_synced = True, False
            Variable._execution_engine.queue_callback(self._end_backward)
            self._adopt_gradients()

    def _end_backward(self, is_complete: bool = True) -> None:
        for turn in reversed(self._turns):
            turn.block.finish(self._reductions)
        self.root.finish(self._reductions)
        self._reductions.finish()
        self._send_late()
        self._turns = [turn for turn in self._turns if not (turn.has_begun or turn.is_use)]
        self._is_in_backward = self._awaits_backward = False
        for block in self._all:
            block.is_reduced = False
        self._free_all()
        if is_complete:
            self._give_gradients()

    def _give_up_backward(self) -> None:
        """End a backward that an exception stopped: send what other ranks wait for, drop all gradients."""
        if self._is_in_backward and not is_in_a_backward():
            self._end_backward(is_complete=False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: each backward sends its own gradients. Loops that accumulate expect this method."""
        yield

    def finish_gradient_sync(self) -> None:
        """Complete the pieces' gradients after the last backward.

        Where a rank did not use a parameter, it contributes zeros. A parameter that no rank used has no
        gradient. Raises WorkbookError if the ranks did not run the same blocks.
        """
        self._give_up_backward()
        self._turns, self._awaits_backward = [], False
        self._free_all()
        self._agree_on_gradients()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns their norm.

        torch.nn.utils.clip_grad_norm_ does the same, with a message for each gradient.
        """
        if not self._is_synced:
            self.finish_gradient_sync()
        return clip_grad_norm_(list(self.parameters()), max_norm, self.group, self.pattern)

    def _free_stale(self) -> None:
        """Free blocks that a forward without a backward gathered before the last optimizer step."""
        for block in self._all:
            if any(unit.is_stale for unit in block.units):
                block.free()

    def _send_late(self) -> None:
        """Reduce gradients that came after their unit was reduced: the same ones on all ranks."""
        for block in self._all:
            for unit in block.trained:
                late = [(position, gradient) for of, position, gradient in self._late if of is unit]
                for position, gradient in late:
                    unit.gradients.put(position, gradient)
                if late:
                    unit.gradients.fill_up(unit.shard.device)
                    self._reductions.start(unit)
        self._late.clear()
        self._reductions.finish()

    def _adopt_gradients(self) -> None:
        for block in self._all:
            for unit in block.trained:
                self._used.difference_update(unit.adopt_gradients())

    def _give_gradients(self) -> None:
        for block in self._all:
            for unit in block.trained:
                unit.give_gradients()

    def _agree_on_gradients(self) -> None:
        """Remove gradients of parameters that no rank used, and check that all ranks ran the same blocks."""
        used = [int(parameter in self._used) for parameter in self._place]
        device = self.units[0].shard.device if self.units else None
        message = torch.tensor([*used, self._order_checksum, -self._order_checksum], device=device)
        all_reduce(message, op="max", group=self.group, pattern=self.pattern)
        *used, most, minus_least = message.tolist()
        self._order_checksum = 0
        if most != -minus_least:
            raise WorkbookError(
                "The ranks ran different blocks in this step, or in different orders; in stage 3 all must "
                "run the same blocks in the same order."
            )
        used_somewhere = iter(used)
        for block in self._all:
            for unit in block.trained:
                for piece in unit.pieces:
                    if not next(used_somewhere):
                        piece.tensor.grad = None
        self._is_synced = True


def _is_trained() -> bool:
    """Return whether what is computed now will have a backward of its own."""
    return torch.is_grad_enabled() and not is_in_a_backward()
