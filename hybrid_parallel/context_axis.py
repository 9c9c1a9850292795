"""Cut sequences among the ranks of the context axis: each of them computes some tokens, in all stages.

      all ranks of a replica    tokens 0 1 2 3 4 5 6 7         the full sequences, which are small
      context 0                 tokens 0 1 6 7 (zigzag)        embedding, norms, MLPs, head: each token alone
      context 1                 tokens 2 3 4 5                 attention: a ring, or all-to-alls (lesson 6)

All ranks have equally many tokens (sizes.py). So the mean loss is the mean over ranks of the means over their
own tokens, and a gradient is the mean over ranks, too: for everything but attention the ranks of the axis are
replicas as those of the data axis are.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group
from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import SequenceCut
from context_parallel.train_all_to_all_attention import all_to_all_attention
from context_parallel.train_ring_attention import ring_attention
from hybrid_parallel.sizes import ParallelSizes
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, Attention

ATTENTION = {"ring": ring_attention, "all_to_all": all_to_all_attention}
CUT_OF = {"ring": SequenceCut.zigzag, "all_to_all": SequenceCut.contiguous}


class ContextAxis:
    """Gives this rank its tokens of each sequence, and lets a GPT's attention meet the tokens of the others.

    `length` is the number of tokens of all sequences. The tensor axis must have divided the model already.
    """

    def __init__(self, model: GPT, group: Group, sizes: ParallelSizes, length: int) -> None:
        self.sizes, self._length = sizes, length
        self.sequence = SharedSequence(group, CUT_OF[sizes.attention](length, sizes.context))
        device = model.position_embedding.weight.device
        self._positions = self.sequence.cut.positions(self.sequence.rank).to(device)
        model.position_embedding.register_forward_pre_hook(self._at_own_positions)
        for block in model.blocks:
            block.attention.attend_by_head = partial(self._attend, block.attention)

    def own(self, full_bt: Tensor) -> Tensor:
        """Return this rank's tokens of full sequences. Raise WorkbookError if these have another length."""
        if full_bt.shape[1] != self._length:
            raise WorkbookError(
                f"The sequences have {full_bt.shape[1]} tokens, and were cut for {self._length}: give all of "
                "them the length of the example."
            )
        return self.sequence.cut.own(full_bt, self.sequence.rank)

    def _at_own_positions(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        [positions_t] = args  # 0, 1, ...: places among this rank's tokens
        return (self._positions.to(positions_t.device)[positions_t],)  # they may be on the device "meta"

    def _attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.is_meta:  # a pipeline learns shapes
            return torch.empty_like(q)
        dropout = attention.dropout if attention.training else 0.0
        return ATTENTION[self.sizes.attention](q, k, v, self.sequence, dropout)
