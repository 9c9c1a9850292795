"""Make a plain GPT or MLP tensor parallel: replace its layers by layers that are divided among the ranks.

      plain                      tensor parallel                        with sequence parallelism
      token_embedding            by vocabulary entries, an all-reduce   a reduce-scatter of tokens
      norms, dropout, residual   the same on every rank                 each rank its shard of the tokens
      q_proj k_proj v_proj       by columns: an n-th of the heads       an all-gather of tokens first
      o_proj                     by rows, an all-reduce                 a reduce-scatter of tokens
      up_proj, down_proj         by columns, by rows                    the same as q_proj and o_proj
      head                       by columns: an n-th of the logits      an all-gather of tokens first

A parameter that every rank holds in full, and applies to the same tokens, has the same gradient on every
rank. With sequence parallelism each rank has seen only its shard of the tokens, so its gradients of norms,
positions and of biases that follow a sum are only terms. `finish_gradient_sync()` adds the terms up.

Dropout masks must be equal where all ranks compute the same, and different where each has its own part:

      residual stream, full on every rank        one mask for all; else the ranks' activations differ
      heads or tokens of one rank                a mask of its own; else n shards repeat one mask
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from comm.collectives import Group, broadcast
from comm.functions import InFlightAllGather, own_shard
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, MLP, Attention, FeedForward
from lab.trace.ledger import Traffic
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
    padded_shard,
    validate_heads,
)
from tensor_parallel.traffic import ExpectedTraffic, modules_of
from training.gradients import average_gradients
from training.guard import guarded
from training.model_on_rank import ModelOnRank, model_on_rank
from training.state_shards import StateShard, buffer_shards, trained_shards

_SEEDS = 2**62


def parallelize(
    model: nn.Module, group: Group = None, sequence_parallel: bool = False, overlap: bool = True
) -> "TensorParallel":
    """Divide a plain GPT or MLP of `lab` among the ranks, in place; weights and random seed become rank 0's.

    `model` may also be a part of one, such as ExpertParallel. `overlap` hides the reductions in the backward
    of column layers. The model keeps its parameter objects, so an optimizer may be made before. Raises
    WorkbookError where the number of ranks does not divide heads or widths; a vocabulary is padded.
    """
    plain = model_on_rank(model).plain
    if not isinstance(plain, GPT | MLP) or (sequence_parallel and isinstance(plain, MLP)):
        raise WorkbookError("parallelize takes a GPT, or an MLP without sequence parallelism.")
    for tensor in [*model.parameters(), *model.buffers()]:
        broadcast(tensor.data, root=0, group=group)
    model.zero_grad()  # a full gradient has not the shape of a shard
    return TensorParallel(model, group, sequence_parallel, overlap)


@guarded  # refuses what would train wrongly (training/guard.py); without it the class does the same
class TensorParallel(ModelOnRank):
    """A model whose layers are divided among the ranks of `group`; `parallelize` makes it.

    A GPT returns this rank's shard of the logits, (batch, time, vocabulary/n), and an MLP its full output:
    compute the loss from it with `loss`. Call `finish_gradient_sync()` after the last backward: it makes
    every gradient complete. Then `clip_grad_norm_` clips by the norm of the full model. A penalty on weights
    belongs in the optimizer (weight_decay): added to the loss, it would count n times for weights that
    `with_own_tokens_only` lists.
    """

    def __init__(self, module: nn.Module, group: Group, sequence_parallel: bool, overlap: bool) -> None:
        super().__init__(module)
        self.group, plain = group, self.plain
        self.sequence_parallel, self.overlap = sequence_parallel, overlap
        options: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        self.embedding: Callable[..., Any] = partial(VocabParallelEmbedding, **options)
        self.column: Callable[..., Any] = partial(ColumnParallelLinear, overlap=overlap, **options)
        self.row: Callable[..., Any] = partial(RowParallelLinear, **options)
        self.randomness = RankRandomness(group, next(module.parameters()).device)
        if isinstance(plain, GPT):
            self._divide_gpt(plain)
        else:
            self._divide_mlp(plain)
        layers = [(path, layer) for path, layer in plain.named_modules() if hasattr(layer, "dims")]
        self.dims = {f"{path}.{name}": where for path, layer in layers for name, where in layer.dims.items()}
        self.divided = [p for name, p in plain.named_parameters() if name in self.dims]
        self.returns_shard = isinstance(plain, GPT)
        ranks = dist.get_world_size(group)
        for parameter in self.with_own_tokens_only():
            if parameter.requires_grad:  # with term * ranks, the mean over ranks is the sum of terms
                parameter.register_hook(lambda term: term * ranks)

    @property
    def inner(self) -> ModelOnRank:
        """Return what answers for the other axes."""
        return model_on_rank(self.module)

    @property
    def plain(self) -> Any:
        return self.inner.plain

    def _divide_mlp(self, model: MLP) -> None:
        for i, layer in enumerate(model.layers):
            is_last = i == len(model.layers) - 1
            model.layers[i] = self.row(layer) if i % 2 else self.column(layer, gather_output=is_last)

    def _divide_gpt(self, model: GPT) -> None:
        config, ranks = model.config, dist.get_world_size(self.group)
        validate_heads(config, self.group)
        model.token_embedding = self.embedding(model.token_embedding)
        model.head = self.column(model.head)
        for block in model.blocks:
            block.attention = ParallelAttention(block.attention, self)
            for mlp in [module for module in block.mlp.modules() if isinstance(module, FeedForward)]:
                mlp.up_proj, mlp.down_proj = self.column(mlp.up_proj), self.row(mlp.down_proj)
        if self.sequence_parallel:
            # A text of block_size tokens may have to be padded.
            model.config = replace(config, block_size=config.block_size + -config.block_size % ranks)
            model.position_embedding = PositionsOfOwnTokens(model.position_embedding, self.group)
            for module in (model, *model.blocks):
                module.dropout = RankDropout(module.dropout.p)
                module.dropout.randomness = self.randomness

    def forward(self, x: Tensor, *positions: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return self.module(x, *positions)
        time, longest = x.shape[1], self.plain.position_embedding.num_embeddings
        if time > longest:
            raise ValueError(f"{time} tokens in a row exceed block_size {longest}")
        # Under a causal mask, tokens at the end change nothing before them.
        padded = F.pad(x, (0, -time % dist.get_world_size(self.group)))
        return self.module(padded, *positions)[:, :time]

    def loss(self, logits_btv: Tensor, targets_bt: Tensor, num_targets: float | None = None) -> Tensor:
        """Return the cross entropy in nats, as `loss_of`; the same on every rank."""
        if not self.returns_shard:
            return self.inner.loss(logits_btv, targets_bt, num_targets)  # of an MLP's full output
        size, logits_btv = self.plain.config.vocab_size, logits_btv.as_subclass(Tensor)
        return vocab_parallel_cross_entropy(logits_btv, targets_bt, size, self.group, num_targets=num_targets)

    def with_own_tokens_only(self) -> list[nn.Parameter]:
        """Return the replicated parameters whose gradient covers only this rank's tokens."""
        named = self.plain.named_parameters() if self.sequence_parallel else ()
        return [parameter for name, parameter in named if name not in self.dims]

    def finish_gradient_sync(self) -> None:
        """Add up the gradients of which each rank has one term; those that are complete stay as they are."""
        parameters = self.with_own_tokens_only()
        if self.held is not None:
            parameters = [self.held[parameter] for parameter in parameters if parameter in self.held]
        average_gradients(parameters, self.group)
        self.inner.finish_gradient_sync()

    @property
    def norm_groups(self) -> list[Group]:
        return [self.group, *self.inner.norm_groups]

    def counted_elsewhere(self) -> set[nn.Parameter]:
        named = self.plain.named_parameters(remove_duplicate=False)
        replicated = {parameter for name, parameter in named if name not in self.dims}
        own = replicated if dist.get_rank(self.group) > 0 else set()
        return own | self.inner.counted_elsewhere()

    def sums_of(self, logits: Tensor, y: Tensor, counts: Tensor) -> Tensor | None:
        """Return on rank 0 the sum of losses, which all ranks compute from their shards of the logits."""
        loss = self.loss(logits, y, num_targets=1).double()  # the sum
        sums: Tensor | None = torch.stack([loss, torch.zeros_like(loss)])
        if not self.returns_shard:
            sums = self.inner.sums_of(logits, y, counts)
        return sums if dist.get_rank(self.group) == 0 else None

    def full_state_dict(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        state = self.plain.state_dict() if state is None else state
        return self.inner.full_state_dict({name: self.full_tensor(name, one) for name, one in state.items()})

    def full_tensor(self, name: str, shard: Tensor) -> Tensor:
        """Return what all ranks together hold of the parameter `name`; every rank must call it."""
        if name not in self.dims:
            return shard
        dim, size = self.dims[name]
        return InFlightAllGather(shard, dim, self.group).wait().narrow(dim, 0, size)

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        own = {name: padded_shard(state[name], dim, self.group) for name, (dim, _) in self.dims.items()}
        self.inner.load_full_state_dict(state | own)

    def state_shards(self, optimizer: torch.optim.Optimizer) -> list[StateShard]:
        found = [*buffer_shards(self.plain)]
        for name, parameter in self.plain.named_parameters():
            shape, offset = self.place_of(name, parameter)
            found += trained_shards(name, parameter, optimizer, shape=shape, offset=offset)
        return found

    def place_of(self, name: str, shard: Tensor) -> tuple[list[int], list[int]]:
        shape, offset = list(shard.shape), [0] * shard.dim()
        if name in self.dims:
            dim, size = self.dims[name]
            offset[dim], shape[dim] = dist.get_rank(self.group) * shape[dim], size
        return shape, offset

    def traffic(self, shape: Sequence[int], is_clipped: bool = False) -> Traffic:
        """Return what a rank sends in a step of a GPT, by formula; `shape` is the batch's: examples, time."""
        expected, parts = ExpectedTraffic(self), modules_of(self.plain.state_dict())
        summed = sum(p.numel() for p in self.with_own_tokens_only() if p.requires_grad)
        norm = expected.sum([("all_reduce", 1)] * is_clipped, itemsize=8)
        return expected.of_parts(shape, parts) + expected.of_gradients(summed) + norm


class ParallelAttention(Attention):
    """Attention with this rank's n-th of the heads. Its three projections share one reduction."""

    def __init__(self, plain: Attention, parallel: TensorParallel) -> None:
        nn.Module.__init__(self)
        self.head_width, self.dropout = plain.head_width, plain.dropout
        self.q_proj, self.k_proj, self.v_proj = map(
            parallel.column, (plain.q_proj, plain.k_proj, plain.v_proj)
        )
        self.o_proj = parallel.row(plain.o_proj)
        self._randomness = parallel.randomness

    def forward(self, x_btd: Tensor) -> Tensor:
        projections: list[Any] = [self.q_proj, self.k_proj, self.v_proj]
        q, k, v = column_parallel(x_btd, projections)
        # Each rank has heads of its own, so each draws its own dropout mask.
        with self._randomness.used(x_btd.device, self.dropout if self.training else 0.0):
            y_btd = self.attend(q, k, v)
        return self.o_proj(y_btd)


class PositionsOfOwnTokens(nn.Embedding):
    """A position embedding that looks up this rank's shard of the positions; padding gets the last one."""

    def __init__(self, plain: nn.Embedding, group: Group) -> None:
        super().__init__(plain.num_embeddings, plain.embedding_dim, _weight=plain.weight.detach())
        self.weight, self._group = plain.weight, group

    def forward(self, positions_t: Tensor) -> Tensor:
        return super().forward(own_shard(positions_t, 0, self._group).clamp(max=self.num_embeddings - 1))


class RankRandomness:
    """This rank's own random numbers, beside those of torch's generator, which gets rank 0's seed here.

    With one seed, torch's generator draws the same numbers on all ranks. For what a rank computes alone, all
    draw one number from it, and each adds its rank to get a seed of its own. So all masks follow from the
    generator's state: where that is restored, to compute a block again or to resume, they are drawn again.
    Megatron-LM keeps a second state of the generator instead (CudaRNGStatesTracker), and restores both.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        seed = torch.tensor([torch.initial_seed() % _SEEDS], device=device)
        broadcast(seed, root=0, group=group)
        torch.manual_seed(int(seed))
        self._rank = dist.get_rank(group)

    @contextlib.contextmanager
    def used(self, device: torch.device, probability: float = 1.0) -> Iterator[None]:
        """Let torch draw numbers of this rank inside the block; do nothing where `probability` is 0.

        All ranks must enter the block, because each draws one number from the generator that they share.
        """
        if not probability:
            yield
            return
        seed = int(torch.randint(_SEEDS, ())) + self._rank
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield


class RankDropout(nn.Dropout):
    """Does what nn.Dropout does, with masks of this rank."""

    randomness: RankRandomness

    def forward(self, x: Tensor) -> Tensor:
        with self.randomness.used(x.device, self.p if self.training else 0.0):
            return super().forward(x)
