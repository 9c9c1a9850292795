"""Wrap a GPT whose ranks see different tokens of the same sequences: cut the input, complete the gradients.

      all ranks     tokens 0 1 2 3 4 5 6 7         the full sequences, which are small
      rank 1        tokens 2 3, positions 2 3      embedding, norms, MLPs, head: each token alone
                    attention                      needs the other ranks' tokens: ring or all-to-all
                    loss of tokens 2 3             the loss of one process is the mean of the ranks' losses

Every rank has all parameters, and its tokens give one term of each gradient. `finish_gradient_sync` takes the
mean over ranks. So ranks of a context parallel group are replicas for everything but attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import training.arguments
from comm.collectives import Group, broadcast
from context_parallel.block_attention import KERNELS, Kernel
from context_parallel.sequence_cut import AttentionPart, Cut, SequenceCut, documents_of
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, Attention
from lab.trace.ledger import Traffic
from training.arguments import NotOffered, Size
from training.gradients import average_gradients, average_traffic
from training.guard import guarded
from training.model_on_rank import ModelOnRank, model_on_rank
from training.state_shards import StateShard
from training.valid_targets import count_valid

MAX_LENGTH = 1 << 20  # tokens


@dataclass
class SharedSequence:
    """Hold what attention needs to know of the sequences that the ranks have cut among them."""

    group: Group
    cut: SequenceCut
    kernel: Kernel = KERNELS["fused"]
    documents: Tensor | None = None  # (batch, time): attention stays within equal numbers
    _parts: dict[int, list[AttentionPart]] = field(default_factory=dict)

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

    @cached_property
    def mask(self) -> Tensor | None:
        """Return which pairs of tokens attend, (batch, 1, time, time); None means the causal ones."""
        if self.documents is None:
            return None
        return (self.documents[:, None, :, None] == self.documents[:, None, None, :]).tril()

    def parts(self, source: int) -> list[AttentionPart]:
        """Return the parts of the attention of this rank's queries to the keys of rank `source`."""
        if source not in self._parts:
            self._parts[source] = list(self.cut.parts(self.rank, source, documents=self.documents))
        return self._parts[source]

    def block_like(self, kv: Tensor, source: int) -> Tensor:
        """Return an empty tensor for keys and values of rank `source`, modulo the number of ranks."""
        return kv.new_empty(*kv.shape[:3], self.cut.length(source % self.size), kv.shape[4])


AttentionFunction = Callable[[Tensor, Tensor, Tensor, SharedSequence, float], Tensor]
LayerTraffic = Callable[[SharedSequence, int, int, int, int], tuple[Traffic, Traffic]]  # of traffic.py


@guarded  # refuses what would train wrongly (training/guard.py); without it the class does the same
class ContextParallel(nn.Module):
    """A GPT of which each rank of `group` computes some tokens; weights become rank 0's.

    `attention` is ring_attention or all_to_all_attention. Calls take the full tokens, (batch, time), and
    return the logits of this rank's tokens. With `has_documents` attention stays within the documents of the
    text. Compute the loss with `loss`, and call `finish_gradient_sync()` after the last backward. A penalty
    on weights may be added to this loss on every rank, because gradients are means over ranks. With
    torch.utils.checkpoint, call the backward before the next forward: a block that is computed again uses the
    sequences of the last forward.
    """

    may_freeze_later = True  # `average_gradients` takes the parameters that are trained in this step

    module: Any  # a GPT, or a part of one, such as TensorParallel

    def __init__(
        self,
        module: nn.Module,
        attention: AttentionFunction,
        cut: Cut = SequenceCut.zigzag,
        kernel: Kernel = KERNELS["fused"],
        group: Group = None,
        has_documents: bool = False,
    ) -> None:
        super().__init__()
        self.module, self.group = module, group
        self._cut, self._kernel = cut, kernel
        self._attention, self._has_documents = attention, has_documents
        if not isinstance(self.plain, GPT):
            raise WorkbookError(f"ContextParallel takes a GPT, not a {type(self.plain).__name__}.")
        self.sequence: SharedSequence | None = None  # of the last forward
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        for block in self.plain.blocks:
            block.attention.attend_by_head = partial(self._attend, block.attention)

    @property
    def inner(self) -> ModelOnRank:
        """Return what answers for the other axes."""
        return model_on_rank(self.module)

    @property
    def plain(self) -> Any:
        return self.inner.plain

    def _attend(self, attention: Attention, q_bhte: Tensor, k_bhte: Tensor, v_bhte: Tensor) -> Tensor:
        """Attend in each head: own queries to the keys of all ranks."""
        assert self.sequence is not None
        dropout = attention.dropout if attention.training else 0.0
        return self._attention(q_bhte, k_bhte, v_bhte, self.sequence, dropout)

    def forward(self, tokens_bt: Tensor, documents_bt: Tensor | None = None) -> Tensor:
        length, longest = tokens_bt.shape[1], self.plain.config.block_size
        if length > longest:
            raise ValueError(f"{length} tokens in a row exceed block_size {longest}")
        cut = self._cut(length, dist.get_world_size(self.group))
        if self._has_documents:
            documents_bt = documents_of(tokens_bt)
        self.sequence = SharedSequence(self.group, cut, self._kernel, documents=documents_bt)
        positions = cut.positions(self.sequence.rank).to(tokens_bt.device, non_blocking=True)
        return self.module(self.own(tokens_bt), positions)

    def own(self, full_bt: Tensor) -> Tensor:
        """Return this rank's tokens of a tensor for full sequences like those of the last forward."""
        assert self.sequence is not None, "there was no forward"
        return self.sequence.cut.own(full_bt, self.sequence.rank)

    def loss(self, logits_btv: Tensor, targets_bt: Tensor, num_targets: float | None = None) -> Tensor:
        """Return this rank's cross entropy in nats: the mean over ranks is the mean over all valid targets.

        Each rank divides its sum of losses by the mean number of valid targets of a rank. So a rank with more
        valid targets counts more. All ranks have all targets, so nothing is sent for it. `num_targets` is the
        number of valid targets in full sequences; None counts them, for which the host waits for a GPU.
        """
        own = self._cut(targets_bt.shape[1], dist.get_world_size(self.group)).own(
            targets_bt, dist.get_rank(self.group)
        )
        num_targets = count_valid(targets_bt) if num_targets is None else num_targets
        mean = num_targets / dist.get_world_size(self.group)
        return self.inner.loss(logits_btv, own, mean)

    def finish_gradient_sync(self) -> None:
        """Take the mean of each gradient over the ranks, all in one all-reduce."""
        average_gradients(self.module.parameters(), self.group)
        self.inner.finish_gradient_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of the gradients, of which each rank of the group has the same."""
        return self.inner.clip_grad_norm_(max_norm, norm_type)

    def evaluation_sums(self, x: Tensor, y: Tensor, counts: Tensor) -> Tensor | None:
        """Return the sums over this rank's tokens of a held-out batch."""
        return self.inner.sums_of(self(x), self.own(y), counts)

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.inner.full_state_dict()

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        self.inner.load_full_state_dict(state)

    def state_shards(self, optimizer: torch.optim.Optimizer) -> list[StateShard]:
        return self.inner.state_shards(optimizer)

    def traffic(self, shape: Sequence[int], layer: LayerTraffic) -> Traffic:
        """Return what this rank sends in a step such as the last one: for attention, and for gradients.

        `shape` is that of the full tokens: batch, time. `layer` is the formula of the attention (traffic.py).
        Under autocast numbers are smaller than it says.
        """
        assert self.sequence is not None, "there was no forward"
        itemsize = next(self.module.parameters()).itemsize
        total = average_traffic(self.module.parameters(), self.group)
        for attention in (block.attention for block in self.plain.blocks):
            width = attention.head_width
            heads, kv_heads = (len(one.weight) // width for one in (attention.q_proj, attention.k_proj))
            total += sum(layer(self.sequence, shape[0] * width, heads, kv_heads, itemsize), Traffic())
        return total


@dataclass
class ContextArgs(training.arguments.Args):
    """Train a small GPT on long sequences, each of them cut among the ranks."""

    batch_size: int = 2
    """Number of sequences in a step. All ranks work on all of them."""
    size: Size = "24heads"
    """Size of the GPT (lab/models/model.py). All-to-all attention needs a number of ranks that divides its
    number of heads: tiny and small have 4, 8layers and 13m have 8, 24heads has 24."""
    length: int = 1024
    """Number of tokens of a sequence. The number of ranks need not divide it."""
    documents: bool = False
    """Let a document begin after each empty line of the text, and attention stay within a document, as where
    several documents are packed into one sequence."""
    metronome: NotOffered = None

    def validate(self, world_size: int) -> None:
        """Raise WorkbookError unless a sequence can have so many tokens."""
        if not 1 <= self.length <= MAX_LENGTH:
            raise WorkbookError(f"--length {self.length}: a sequence has 1 to {MAX_LENGTH} tokens.")

    def made_with(self) -> dict[str, Any]:
        """Return what another run must have, too, to go on from this one's checkpoint."""
        return super().made_with() | self.chosen("documents")
