"""Wrap a GPT whose ranks see different tokens of the same sequences: cut the input, complete the gradients.

      all ranks     tokens 0 1 2 3 4 5 6 7         the full sequences, which are small
      rank 1        tokens 2 3, positions 2 3      embedding, norms, MLPs, head: each token alone
                    attention                      needs the other ranks' tokens: ring or all-to-all
                    loss of tokens 2 3             its term of the mean over all tokens

Every rank has all parameters, and its tokens give one term of each gradient. `finish_gradient_sync` adds the
terms up. So ranks of a context parallel group are replicas for everything but attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from comm.collectives import Group, all_reduce, broadcast, chosen_pattern
from comm.cost import expected_traffic
from context_parallel.block_attention import KERNELS, Kernel
from context_parallel.sequence_cut import Part, SequenceCut
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, Attention
from lab.trace.ledger import Traffic

Cut = Callable[[int, int], SequenceCut]  # from a sequence's length and the number of ranks


@dataclass
class SharedSequence:
    """Hold what attention needs to know of the sequences that the ranks have cut among them."""

    group: Group
    cut: SequenceCut
    kernel: Kernel = KERNELS["fused"]
    is_causal: bool = True
    documents: Tensor | None = None  # (batch, time): attention stays within equal numbers
    _parts: dict[int, list[Part]] = field(default_factory=dict)
    _mask: Tensor | None = None  # of all layers

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def lengths(self) -> list[int]:
        """Return how many tokens each rank has."""
        return [self.cut.length(rank) for rank in range(self.size)]

    def mask(self) -> Tensor | None:
        """Return which pairs of tokens attend, (batch, 1, time, time); None means all, or the causal ones."""
        if self._mask is None and self.documents is not None:
            same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
            self._mask = same.tril() if self.is_causal else same
        return self._mask

    def parts(self, source: int) -> list[Part]:
        """Return the parts of the attention of this rank's queries to the keys of rank `source`."""
        if source not in self._parts:
            self._parts[source] = list(self.cut.parts(self.rank, source, self.is_causal, self.documents))
        return self._parts[source]

    def block_like(self, kv: Tensor, source: int) -> Tensor:
        """Return an empty tensor for keys and values of rank `source`, modulo the number of ranks."""
        return kv.new_empty(*kv.shape[:3], self.cut.length(source % self.size), kv.shape[4])


AttentionFunction = Callable[[Tensor, Tensor, Tensor, SharedSequence, float], Tensor]


class ContextParallel(nn.Module):
    """A GPT of which each rank of `group` computes some tokens; weights become rank 0's.

    `attention` is ring_attention or all_to_all_attention. Calls take the full tokens, (batch, time), and
    return the logits of this rank's tokens. Compute the loss with `loss`, and call `finish_gradient_sync()`
    after the last backward. With torch.utils.checkpoint, call the backward before the next forward: a block
    that is computed again uses the sequences of the last forward.
    """

    def __init__(
        self,
        module: GPT,
        attention: AttentionFunction,
        cut: Cut = SequenceCut.zigzag,
        kernel: Kernel = KERNELS["fused"],
        group: Group = None,
    ) -> None:
        super().__init__()
        _validate(module)
        self.module, self.group, self._cut, self._kernel = module, group, cut, kernel
        self._pattern = chosen_pattern("all_reduce", group)
        self.sequence: SharedSequence | None = None  # of the last forward
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        for block in module.blocks:
            block.attention = ContextAttention(block.attention, attention, self)

    def forward(self, tokens_bt: Tensor, documents_bt: Tensor | None = None) -> Tensor:
        length, longest = tokens_bt.shape[1], self.module.config.block_size
        if length > longest:
            raise ValueError(f"{length} tokens in a row exceed block_size {longest}")
        cut = self._cut(length, dist.get_world_size(self.group))
        self.sequence = SharedSequence(self.group, cut, self._kernel, documents=documents_bt)
        positions = cut.positions(self.sequence.rank).to(tokens_bt.device)
        return self.module(self.own(tokens_bt), positions)

    def own(self, full_bt: Tensor) -> Tensor:
        """Return this rank's tokens of a tensor for full sequences like those of the last forward."""
        assert self.sequence is not None, "there was no forward"
        return self.sequence.cut.own(full_bt, self.sequence.rank)

    def loss(self, logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
        """Return this rank's term of the cross entropy in nats: over all ranks they add up to the mean."""
        own = self.own(targets_bt)
        return F.cross_entropy(logits_btv.flatten(0, 1), own.flatten(), reduction="sum") / targets_bt.numel()

    def finish_gradient_sync(self) -> None:
        """Add up the terms of the gradients, all in one all-reduce. Parameters without gradient have none.

        Call this once between two calls of zero_grad(): a second call would add up sums, not terms.
        """
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if gradients:
            total = torch.cat([gradient.flatten() for gradient in gradients])
            all_reduce(total, group=self.group, pattern=self._pattern)
            for gradient, sum_ in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(sum_.view_as(gradient))

    def gradient_traffic(self) -> Traffic:
        """Return what this rank sends in `finish_gradient_sync`, by formula."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        numel, itemsize = sum(p.numel() for p in trained), next(self.module.parameters()).itemsize
        return expected_traffic("all_reduce", self._pattern, numel, itemsize, self.group)


class ContextAttention(Attention):
    """Attention of this rank's queries to the keys of all ranks; the projections are those of `plain`."""

    def __init__(self, plain: Attention, attention: AttentionFunction, model: ContextParallel) -> None:
        nn.Module.__init__(self)
        self.head_width, self.dropout = plain.head_width, plain.dropout
        self.q_proj, self.k_proj, self.v_proj = plain.q_proj, plain.k_proj, plain.v_proj
        self.o_proj = plain.o_proj
        self._attention = attention
        self._sequence_of = lambda: model.sequence  # a module as an attribute would become a submodule

    def attend_by_head(self, q_bhte: Tensor, k_bhte: Tensor, v_bhte: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return self._attention(q_bhte, k_bhte, v_bhte, self._sequence_of(), dropout)


def _validate(module: nn.Module) -> None:
    if not isinstance(module, GPT):
        raise WorkbookError(f"ContextParallel takes a GPT, not a {type(module).__name__}.")
    if any(isinstance(block.attention, ContextAttention) for block in module.blocks):
        raise WorkbookError("The model is context parallel already: wrap a plain one.")
