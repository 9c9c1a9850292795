"""A module that is full only by the block: the hooks of ZeRO's stage 3. The idea is in train_zero3.py.

      forward      before block k   wait for its parameters, start to gather those of block k+1
                   after it         free them
      backward     before block k   the same, with block k-1 next
                   after it         free them, start to reduce its gradients

What comes before and after the blocks (embeddings, the last norm, what blocks share) is gathered for the
whole step. Which blocks there are, and their order, shows in the first forward. The hooks make it fast: what
they miss is gathered when it is touched, and what a graph needs when its backward asks (data_parallel.freed).
"""

from typing import Any

import torch
from torch import nn

from comm.collectives import Group
from data_parallel.any_loop import AnyLoop, Turn
from data_parallel.freed import Notes, is_in_a_backward, take_gradient
from data_parallel.unit import Block
from lab.errors import WorkbookError
from lab.ledger import Traffic
from lab.nested import map_tensors, tensors_in

MIB = 1 << 20


class FullyShardedDataParallel(AnyLoop):
    """Wraps a module; its `parameters()` are this rank's pieces, for any elementwise optimizer.

    `blocks` are gathered and freed one by one: by default the members of each ModuleList, ModuleDict and
    Sequential. Every rank must run the same blocks; within them, parameters may be tied, frozen or unused.
    `compute_dtype` is the dtype of floating-point parameters and inputs in computing and on the wire; shards,
    and with them the optimizer, keep the parameters' own, which an output in `compute_dtype` gets back.
    Buffers become rank 0's once; from then on they are each rank's own, as in FSDP2 (DDP sends rank 0's
    before each forward), and rank 0's are saved.

    Forwards and backwards may come in any number and order, as in DDP: gradients add up until the pieces' are
    cleared. Divide each microbatch's loss by their number, and call `finish_gradient_sync()` after the last
    backward: then each piece's `grad` is the mean over ranks. After an exception `zero_grad()` is enough.

    What it does not do, and refuses in a sentence: `state_dict`, `load_state_dict` and `deepcopy`; moving or
    casting the wrapped model; looking at a parameter outside of a forward and of `gathered()`; training what
    was added, replaced or unfrozen after wrapping; an optimizer over the module's own parameters; a loss that
    uses the pieces. Sparse gradients become dense.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        compute_dtype: torch.dtype | None = None,
        pattern: str | None = None,
        reshard_after_forward: bool = True,
        blocks: list[nn.Module] | None = None,
        unit_mb: float = 4.0,
    ) -> None:
        super().__init__(module, group, pattern, compute_dtype, blocks, int(unit_mb * MIB))
        self._reshards = reshard_after_forward
        for block, inner in zip(self.blocks, self._block_modules, strict=True):
            inner.register_forward_pre_hook(lambda *_, block=block: self._before_forward(block))
            inner.register_forward_hook(lambda _, inputs, out, block=block: self._after_forward(block, out))
        self._seen: list[Block] = []  # in this forward
        self._order: list[Block] = []  # in the one before, which tells what comes next

    def forward(self, *inputs: Any, **options: Any) -> Any:
        is_trained = torch.is_grad_enabled() and not is_in_a_backward()
        if is_trained:
            self._wrapped.refuse_changes()
            self._give_up_backward()
        self._awaits_backward |= is_trained
        self._free_stale()
        self._seen, self._is_in_forward = [], True
        try:
            self.root.start_gather()
            if self._order:
                self._order[0].start_gather()
            self.root.gather()
            with Notes(self._full_units, self._begin_backward):
                inputs, options = map_tensors((inputs, options), self._as_computed)
                output = map_tensors(self.module(*inputs, **options), self._as_given)
        except BaseException:
            self._free_all()
            raise
        finally:
            self._is_in_forward = False
        self._order = self._seen
        self._free_touched(self._reshards)
        for tensor in tensors_in(output) if is_trained else ():
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)
        return output

    def _before_forward(self, block: Block) -> None:
        if is_in_a_backward():
            block.gather()  # activations are being recomputed
            return
        if torch.is_grad_enabled() and not self._is_in_forward:
            raise WorkbookError("A block was called by itself: call the model, which gathers what it needs.")
        block.gather()
        self._seen.append(block)
        if torch.is_grad_enabled():
            block.turn = Turn(block)
            self._turns.append(block.turn)
            self._count_run(block)
        so_far = len(self._seen)
        if self._order[:so_far] == self._seen and so_far < len(self._order):
            self._order[so_far].start_gather()

    def _after_forward(self, block: Block, output: Any) -> None:
        if is_in_a_backward():
            return
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, turn=block.turn: self._before_backward(turn))
        if self._reshards or not torch.is_grad_enabled():
            block.free()
            if torch.is_grad_enabled() and self._seen == self._order:
                block.start_gather()  # the last one: its backward is near

    def _before_backward(self, turn: Turn) -> None:
        """The gradient of a block's output is known: its backward is next, and those after it are over."""
        self._begin_backward()
        if turn.has_begun or turn not in self._turns:
            return  # a block with several outputs, or a second backward of one graph
        turn.has_begun, at = True, self._turns.index(turn)
        not_over = {other.block for other in self._turns if not other.has_begun} | {turn.block}
        for later in self._turns[at + 1 :]:
            if later.block not in not_over:
                self._finish(later.block)
        turn.block.gather()
        if at > 0:
            self._turns[at - 1].block.start_gather()

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._begin_backward()
        gradient = take_gradient(parameter)
        if gradient is None:
            return  # an operation may have none for one of its inputs
        block, gradients, position = self._place[parameter]
        self._used.add(parameter)
        if block.is_reduced:
            self._late.append((gradients, position, gradient))  # the block was used in another one's forward
            return
        gradients.put(position, gradient)
        if block is not self.root and block.send_complete(self._on_the_way):
            block.is_reduced = True
            block.free_trained()

    def _finish(self, block: Block) -> None:
        """Free the block; send its gradients, zeros for those that it has not."""
        block.free()
        if not block.is_reduced:
            block.is_reduced = True
            block.send_rest(self._on_the_way)

    def traffic_per_step(self, microbatches: int = 1, is_clipped: bool = False) -> Traffic:
        """What the formula says a step sends, in which every block is run forward and backward once."""
        gathers = dict.fromkeys(self.blocks, 2 if self._reshards else 1) | {self.root: 1}
        return self._traffic(gathers, microbatches, is_clipped)
