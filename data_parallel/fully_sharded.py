"""A module that is whole only by the block: the hooks of ZeRO's stage 3. The idea is in train_zero3.py.

      forward      before block k   wait for its parameters, start to gather those of block k+1
                   after it         free them
      backward     before block k   the same, with block k-1 next
                   after it         free them, start to reduce its gradients

What comes before and after the blocks (embeddings, the last norm, what blocks share) is gathered for the
whole step. Which blocks there are, and their order, shows in the first forward.
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from comm import cost
from comm.collectives import Group, all_reduce, broadcast, default_pattern
from data_parallel.flat import Piece
from data_parallel.gradient_shard import GradientShard, OnTheWay
from data_parallel.sharded_optimizer import clip_grad_norm_
from data_parallel.unit import Block, Unit, blocks_of
from lab.errors import WorkbookError
from lab.ledger import Traffic

MIB = 1 << 20


class FullyShardedDataParallel(nn.Module):
    """Wraps a module; its `parameters()` are this rank's pieces, for any elementwise optimizer.

    `blocks` are gathered and freed one by one: by default the members of each nn.ModuleList. Every rank must
    run the same blocks; within them, parameters may be tied, frozen or unused. `compute_dtype` is that of
    computing and of the wire; shards, and with them the optimizer, keep the parameters' own. Call
    `finish_gradient_sync()` after the (last) backward: then each piece's `grad` is the mean over ranks.
    Several microbatches: divide each one's loss by their number, all but the last inside `no_sync()`.
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
        super().__init__()
        self.module, self.group, self.pattern = module, group, pattern
        self._compute_dtype, self._reshards = compute_dtype, reshard_after_forward
        for buffer in module.buffers():
            broadcast(buffer, root=0, group=group)
        self._names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(parameter, []).append(name)
        modules = blocks_of(module) if blocks is None else blocks
        self._output_dtype = next(iter(self._names)).dtype if compute_dtype else None
        # What two blocks share, or what is in none, is the root's.
        users = [set(block.parameters()) for block in modules]
        shared = {p for p in self._names if sum(p in used for used in users) != 1}
        own = [[p for p in block.parameters() if p not in shared] for block in modules]
        options = int(unit_mb * MIB), group, pattern, compute_dtype
        self.root = Block("root", [p for p in self._names if p in shared], *options)
        self.blocks = [Block(f"block {i}", parameters, *options) for i, parameters in enumerate(own)]
        self._all = [self.root, *self.blocks]
        self._place: dict[nn.Parameter, tuple[Block, GradientShard, int]] = {}
        for block in self._all:
            for unit, gradients in block.trained:
                for position, piece in enumerate(unit.pieces):
                    self._place[piece.parameter] = block, gradients, position
                    piece.parameter.register_post_accumulate_grad_hook(self._on_gradient)
        for block, inner in zip(self.blocks, modules, strict=True):
            inner.register_forward_pre_hook(lambda *_, block=block: self._before_forward(block))
            inner.register_forward_hook(lambda _, inputs, out, block=block: self._after_forward(block, out))
        self._awaits_backward = False
        self._ran: list[Block] = []  # and will be run backward
        self._seen: list[Block] = []  # in this forward
        self._order: list[Block] = []  # in the one before, which tells what comes next
        self._on_the_way = OnTheWay(2 * max(block.num_bytes for block in self._all))
        self._begun: set[int] = set()  # positions in `_ran` whose backward has
        self._used: set[nn.Parameter] = set()
        self._order_so_far = 0  # a checksum of all blocks run since gradients were synchronised, in order
        self._is_synced = True

    @property
    def units(self) -> list[Unit]:
        """What is gathered together."""
        return [unit for block in self._all for unit in block.units]

    @property
    def pieces(self) -> dict[str, Piece]:
        """What this rank owns of each parameter, by name; of tied ones the first."""
        owned = {piece.parameter: piece for unit in self.units for piece in unit.pieces}
        return {names[0]: owned[parameter] for parameter, names in self._names.items()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The pieces, under the names of the parameters that they are of."""
        for name, piece in self.pieces.items():
            yield f"{prefix}.{name}" if prefix else name, piece.tensor

    def forward(self, *inputs: Tensor) -> Tensor:
        if self._compute_dtype is not None:
            inputs = tuple(x.to(self._compute_dtype) if x.is_floating_point() else x for x in inputs)
        if torch.is_grad_enabled():
            if self._awaits_backward:
                raise WorkbookError(
                    "A second forward began before finish_gradient_sync(): run all microbatches but the last "
                    "inside no_sync(), and evaluate under torch.no_grad()."
                )
            self._awaits_backward = True
        self._seen = []
        self.root.start_gather()
        if self._order:
            self._order[0].start_gather()
        self.root.gather()
        output = self.module(*inputs)
        self._order = self._seen
        if not self._awaits_backward:
            self._free_all()
        return output if self._output_dtype is None else output.to(self._output_dtype)

    def _before_forward(self, block: Block) -> None:
        block.gather()
        if block.is_in_backward:
            return  # activations are being recomputed
        self._seen.append(block)
        if torch.is_grad_enabled():
            self._ran.append(block)
            block.runs += 1
        so_far = len(self._seen)
        if self._order[:so_far] == self._seen and so_far < len(self._order):
            self._order[so_far].start_gather()

    def _after_forward(self, block: Block, output: Any) -> None:
        if block.is_in_backward:
            return
        if torch.is_grad_enabled():
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    turn = len(self._ran) - 1
                    tensor.register_hook(lambda _, turn=turn: self._before_backward(turn))
        if self._reshards or not torch.is_grad_enabled():
            block.free()
            if torch.is_grad_enabled() and self._seen == self._order:
                block.start_gather()  # the last one: its backward is near

    def _before_backward(self, turn: int) -> None:
        """The gradient of a block's output is known: its backward is next, and those after it are over."""
        if turn in self._begun:
            return  # a block with several outputs
        self._begun.add(turn)
        block = self._ran[turn]
        for later in self._ran[turn + 1 :]:
            if later is not block and later.turns == later.runs:
                self._finish(later)
        block.turns += 1
        block.gather()
        if turn > 0:
            self._ran[turn - 1].start_gather()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._is_synced:
            self._begin_gradients()
        block, gradients, position = self._place[parameter]
        if block.is_reduced:
            raise WorkbookError(
                f"{self._names[parameter][0]} got a gradient after its block's backward was over: its module "
                "is used outside of its block; leave that block out of `blocks`."
            )
        gradients.put(position, parameter.grad)
        parameter.grad = None
        self._used.add(parameter)
        if block is not self.root and block.send_complete(self._on_the_way):
            self._finish(block)

    def _begin_gradients(self) -> None:
        self._is_synced = False
        for block in self._all:
            for unit, gradients in block.trained:
                if all(piece.tensor.grad is None for piece in unit.pieces):
                    gradients.clear()

    def _finish(self, block: Block) -> None:
        """Free the block; send its gradients, zeros for those that it has not."""
        if not block.is_reduced:
            block.is_reduced = True
            block.free()
            block.send_rest(self._on_the_way)

    def _finish_backward(self) -> None:
        if self._is_synced:
            self._begin_gradients()
        for block in reversed(self._ran):
            self._finish(block)
        self._finish(self.root)
        self._on_the_way.finish()
        numbers = bytes(self.blocks.index(block) % 256 for block in self._ran)
        self._order_so_far = zlib.crc32(numbers, self._order_so_far)
        for block in self._all:
            block.runs = block.turns = 0
            block.is_reduced = False
        self._free_all()
        self._ran, self._begun, self._awaits_backward = [], set(), False

    def _free_all(self) -> None:
        for block in self._all:
            block.free()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last microbatch. Gradients add up in the shards: each microbatch sends its own."""
        yield
        self._finish_backward()

    def finish_gradient_sync(self) -> None:
        """Send what is missing, and wait: then the pieces have their gradients.

        A parameter that only some ranks used counts as zero on the others; one that no rank used has no
        gradient. WorkbookError if the ranks did not run the same blocks.
        """
        self._finish_backward()
        used = [int(parameter in self._used) for parameter in self._place]
        device = next(iter(self._place)).device if self._place else None
        message = torch.tensor([*used, self._order_so_far, -self._order_so_far], device=device)
        all_reduce(message, op="max", group=self.group, pattern=self.pattern)
        *used, most, minus_least = message.tolist()
        self._order_so_far = 0
        if most != -minus_least:
            raise WorkbookError(
                "The ranks ran different blocks in this step, or in another order; in stage 3 all must run "
                "the same."
            )
        used_somewhere = iter(used)
        for block in self._all:
            for unit, gradients in block.trained:
                full = unit.flat.pieces(gradients.shard) if gradients.shard is not None else None
                for position, piece in enumerate(unit.pieces):
                    piece.tensor.grad = full[position][1] if next(used_somewhere) and full else None
        self._used.clear()
        self._is_synced = True

    def traffic_per_step(self, microbatches: int = 1, is_clipped: bool = False) -> Traffic:
        """What the formula says a step sends, in which every block is run forward and backward once."""
        gathers = dict.fromkeys(self.blocks, 2 if self._reshards else 1) | {self.root: 1}
        traffics = [
            unit.traffic(gathers[block]) for block in self._all for unit in block.units
        ] * microbatches
        pattern = self.pattern or default_pattern("all_reduce", self.group)
        place = dist.get_world_size(self.group), dist.get_rank(self.group)
        for numel, itemsize in [(len(self._place) + 2, 8)] + [(1, 4)] * is_clipped:
            traffics.append(cost.per_rank("all_reduce", pattern, numel, itemsize, *place))
        return sum(traffics, Traffic())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns their norm."""
        if self._awaits_backward:
            self.finish_gradient_sync()
        return clip_grad_norm_(list(self.parameters()), max_norm, self.group, self.pattern)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with all its parameters whole, as it computes with them; to look at, not to change."""
        for block in self._all:
            block.gather()
        try:
            yield self.module
        finally:
            for unit in self.units:
                unit.renew()  # an array may have been made of a parameter, and numpy keeps its memory

    def full_state_dict(self) -> dict[str, Tensor]:
        """On rank 0, what a plain module of the same class loads, on the CPU; empty on the others.

        One block's parameters are whole at a time. Every rank must call it.
        """
        result: dict[str, Tensor] = {}
        is_main = dist.get_rank(self.group) == 0
        for unit in self.units:
            for piece, full in zip(unit.pieces, unit.whole_master(), strict=True):
                if is_main:
                    result |= dict.fromkeys(self._names[piece.parameter], full.cpu().clone())
        if is_main:
            result |= {name: buffer.cpu().clone() for name, buffer in self.module.named_buffers()}
        return result
