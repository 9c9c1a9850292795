"""A plain GPT or MLP becomes tensor parallel: the same model, its layers replaced by those cut among ranks.

      plain                      tensor parallel                        with sequence_parallel
      token_embedding            by words, sums over ranks              sums scattered by tokens
      norms, dropout, residual   the same on every rank                 on an n-th of the tokens
      q_proj k_proj v_proj       by columns: an n-th of the heads       gathers the tokens first
      o_proj                     by rows, sums over ranks               sums scattered by tokens
      up_proj, down_proj         by columns, by rows                    the same
      head                       by words: an n-th of the logits        gathers the tokens first

What every rank has whole and uses on the same tokens has the same gradient everywhere. With sequence_parallel
each rank has seen only its own tokens: `finish_gradient_sync()` adds these gradients up (norms, biases behind
the sums, positions).
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from comm import cost
from comm.collectives import Group, all_reduce, broadcast, fastest_pattern
from comm.functions import InFlightAllGather, own_shard
from lab.errors import WorkbookError
from lab.ledger import Traffic
from lab.model import GPT, MLP, Attention
from tensor_parallel.accumulation import PartialGradients
from tensor_parallel.arguments import the_tensor_of
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
    pad_vocabulary,
    refuse_unless_divided,
)
from tensor_parallel.randomness import RankDropout, RankRandomness
from training.gradient_part import GradientPart
from training.norm import sum_of_squares


class TensorParallel(nn.Module):
    """A model whose layers are cut among the ranks of `group`; made by `parallelize`.

    A GPT returns this rank's part of the logits, (b, t, v/n): take the loss of these by `loss`. An MLP
    returns its whole output. `finish_gradient_sync()` after the backward makes every gradient complete.

    Afterwards torch's own clip_grad_norm_ and GradScaler see one gradient of all ranks, too.

    What it does not do: second derivatives, and optimizers that have stepped before.
    """

    def __init__(self, module: nn.Module, group: Group, sequence_parallel: bool) -> None:
        super().__init__()
        self.module, self.group, self.sequence_parallel = module, group, sequence_parallel
        self.randomness = RankRandomness(group)
        self._cut: dict[nn.Parameter, tuple[int, int]] = {}  # along which dim, and its whole size there
        self.dims: dict[str, tuple[int, int]] = {}  # `_cut` by name
        self._partial, self._pattern = PartialGradients(), fastest_pattern("all_reduce", group)

    def part(self, whole: nn.Parameter, dim: int, padded: Tensor | None = None) -> nn.Parameter:
        """Make the parameter this rank's part of itself: an optimizer that has it goes on with the part."""
        if not isinstance(whole, nn.Parameter):
            raise WorkbookError(
                "A weight that is computed from others cannot be cut: remove parametrizations."
            )
        source, self._cut[whole] = whole.detach() if padded is None else padded, (dim, whole.shape[dim])
        whole.grad, whole.data = None, own_shard(source, dim, self.group).clone()
        return whole

    def column(
        self, plain: nn.Linear, gather_output: bool = False, words: bool = False
    ) -> ColumnParallelLinear:
        """The layer cut by its outputs, which are padded if they are words. A tied weight is cut already."""
        layer = ColumnParallelLinear(
            1, dist.get_world_size(self.group), False, self.group, self.sequence_parallel, gather_output
        )
        for name, parameter in (("weight", plain.weight), ("bias", plain.bias)):
            if parameter is not None and parameter not in self._cut:
                padded = pad_vocabulary(parameter.detach(), self.group) if words else None
                self.part(parameter, 0, padded)
            setattr(layer, name, parameter)
        return layer

    def row(self, plain: nn.Linear) -> RowParallelLinear:
        """The layer cut by its inputs."""
        ranks = dist.get_world_size(self.group)
        layer = RowParallelLinear(ranks, 1, False, self.group, self.sequence_parallel)
        layer.weight = self.part(plain.weight, 1)
        layer.bias = plain.bias
        return layer

    def sort_parameters(self) -> None:
        """Take note of who has what, once all layers are cut."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        self.dims = {name: self._cut[p] for name, p in parameters.items() if p in self._cut}
        self._cut.clear()
        self._partial.watch(self._by_tokens())

    def _by_tokens(self) -> list[nn.Parameter]:
        """Return the parameters that are replicated, but have the gradient of this rank's tokens only."""
        named = self.module.named_parameters() if self.sequence_parallel else ()
        return [parameter for name, parameter in named if name not in self.dims]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = the_tensor_of(args, kwargs)
        time = x.shape[1] if isinstance(self.module, GPT) else 0
        if self.sequence_parallel:
            longest = self.module.position_embedding.num_embeddings
            if time > longest:
                raise ValueError(f"{time} tokens in a row exceed block_size {longest}")
            # Behind a causal mask, tokens at the end change nothing before them.
            x = F.pad(x, (0, -time % dist.get_world_size(self.group)))
        y = self.module(x)
        return y[:, :time] if self.sequence_parallel else y

    def loss(self, logits_btw: Tensor, targets_bt: Tensor) -> Tensor:
        """Cross entropy in nats, the mean over all tokens; the same on every rank."""
        return vocab_parallel_cross_entropy(logits_btw, targets_bt, self.module.config.vocab_size, self.group)

    def finish_gradient_sync(self) -> None:
        """Add up what each rank has of its own tokens only, of all backwards since the last call."""
        with self._partial.completing(self._by_tokens()) as gradients:
            if gradients:
                total = torch.cat([gradient.flatten() for gradient in gradients])
                all_reduce(total, group=self.group, pattern=self._pattern)
                parts = total.split([gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))
        for name, parameter in self.module.named_parameters():
            if name in self.dims and type(parameter.grad) is Tensor:
                parameter.grad = GradientPart.of(parameter.grad, self.group, self._pattern)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch's clip_grad_norm_ on the whole model: cut parameters add up, others count once."""
        device = next(self.module.parameters()).device
        mine, common = torch.zeros(2, dtype=torch.float64, device=device)
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                (mine if name in self.dims else common).add_(sum_of_squares(parameter.grad))
        all_reduce(mine, group=self.group, pattern=self._pattern)
        norm = (mine + common).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad))
        return norm

    def traffic_per_block(self, batch: int, time: int) -> Traffic:
        """What the formula says this rank sends for a GPT's block, forward and backward."""
        if not self.sequence_parallel:
            return self._sent([("all_reduce", self._numel(batch, time))] * 4)
        # Two column layers gather forward and backward, and scatter backward; two row layers scatter forward
        # and gather backward.
        one = self._numel(batch, time)
        return self._sent([("all_gather", one)] * 6 + [("reduce_scatter", one)] * 4)

    def traffic_per_step(self, batch: int, time: int, is_clipped: bool = False) -> Traffic:
        """What the formula says a GPT's step sends: blocks, embedding, head, loss, what is added up."""
        one, tokens = self._numel(batch, time), batch * time
        # The embedding is as a row layer, the head as a column layer.
        rest = [("all_reduce", one)] * 2
        if self.sequence_parallel:
            rest = [("all_gather", one)] * 3 + [("reduce_scatter", one)] * 2
            rest += [("all_reduce", sum(parameter.numel() for parameter in self._by_tokens()))]
        rest += [("all_reduce", tokens), ("all_reduce", 3 * tokens)]  # the cross entropy
        blocks = [self.traffic_per_block(batch, time)] * self.module.config.num_layers
        norm = self._sent([("all_reduce", 1)] * is_clipped, itemsize=8)
        return sum(blocks, self._sent(rest) + norm)

    def _numel(self, batch: int, time: int) -> int:
        """Of what lies between two halves of a block, with padding."""
        ranks = dist.get_world_size(self.group)
        padded = time + -time % ranks if self.sequence_parallel else time
        return batch * padded * self.module.config.width

    def _sent(self, ops: list[tuple[str, int]], itemsize: int | None = None) -> Traffic:
        place = dist.get_world_size(self.group), dist.get_rank(self.group)
        itemsize = itemsize or next(self.module.parameters()).itemsize
        traffics = (
            cost.per_rank(op, fastest_pattern(op, self.group), numel, itemsize, *place) for op, numel in ops
        )
        return sum(traffics, Traffic())

    def full_state_dict(self) -> dict[str, Tensor]:
        """What a plain model of the same class loads; whole on every rank, so every rank must call it."""
        state = {}
        for name, tensor in self.module.state_dict().items():
            state[name] = tensor.clone()
            if name in self.dims:
                dim, size = self.dims[name]
                state[name] = InFlightAllGather(tensor, dim, self.group).wait().narrow(dim, 0, size).clone()
        return state

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's parts from a plain model's state."""
        self.module.load_state_dict({name: self.part_of(name, tensor) for name, tensor in state.items()})

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        if name not in self.dims:
            return whole
        dim, _ = self.dims[name]
        is_padded = name in ("token_embedding.weight", "head.weight", "head.bias")
        return own_shard(pad_vocabulary(whole, self.group) if is_padded else whole, dim, self.group)


def parallelize(model: nn.Module, group: Group = None, sequence_parallel: bool = False) -> TensorParallel:
    """Cut a plain GPT or MLP of `lab` among the ranks, in place; weights and random seed become rank 0's.

    The model keeps its parameters, so an optimizer may be made before. WorkbookError where heads or widths do
    not divide; a vocabulary is padded.
    """
    _refuse(model, group, sequence_parallel)
    for tensor in [*model.parameters(), *model.buffers()]:
        broadcast(tensor.data, root=0, group=group)
    model.zero_grad()
    parallel = TensorParallel(model, group, sequence_parallel)
    if isinstance(model, GPT):
        _cut_gpt(model, parallel)
    else:
        for i, layer in enumerate(model.layers):
            is_last = i == len(model.layers) - 1
            model.layers[i] = parallel.row(layer) if i % 2 else parallel.column(layer, gather_output=is_last)
    parallel.sort_parameters()
    return parallel


def _refuse(model: nn.Module, group: Group, sequence_parallel: bool) -> None:
    """Raise WorkbookError, while the model is as it was, if it cannot be cut."""
    if not isinstance(model, GPT | MLP) or (sequence_parallel and isinstance(model, MLP)):
        what = "An MLP has no tokens to cut" if isinstance(model, MLP) else f"not a {type(model).__name__}"
        raise WorkbookError(f"parallelize takes a GPT, or an MLP without sequence parallelism: {what}.")
    if any(isinstance(module, ColumnParallelLinear) for module in model.modules()):
        raise WorkbookError("The model is tensor parallel already: parallelize a plain one.")
    if isinstance(model, GPT):
        refuse_unless_divided("query heads", model.config.num_heads, group)
        refuse_unless_divided("key and value heads", model.config.kv_heads, group)
    else:
        for i, layer in enumerate(model.layers):
            of_outputs, of_inputs = ("outputs", layer.out_features), ("inputs", layer.in_features)
            refuse_unless_divided(*(of_inputs if i % 2 else of_outputs), group)


def _cut_gpt(model: GPT, parallel: TensorParallel) -> None:
    config, ranks, by_tokens = model.config, dist.get_world_size(parallel.group), parallel.sequence_parallel
    words = model.token_embedding.weight
    embedding = VocabParallelEmbedding(ranks, 1, parallel.group, by_tokens)
    embedding.num_words = config.vocab_size
    embedding.weight = parallel.part(words, 0, pad_vocabulary(words.detach(), parallel.group))
    model.token_embedding, model.head = embedding, parallel.column(model.head, words=True)
    if by_tokens:
        # A text as long as the block may have to be padded.
        model.config = replace(config, block_size=config.block_size + -config.block_size % ranks)
        model.position_embedding = OwnPositions(model.position_embedding, parallel.group)
        model.dropout = RankDropout(model.dropout.p, parallel.randomness)
    for block in model.blocks:
        block.attention = ParallelAttention(block.attention, parallel)
        block.mlp.up_proj = parallel.column(block.mlp.up_proj)
        block.mlp.down_proj = parallel.row(block.mlp.down_proj)
        if by_tokens:
            block.dropout = RankDropout(block.dropout.p, parallel.randomness)


class ParallelAttention(Attention):
    """An n-th of the heads; the three projections share their input, so its gradients are reduced once."""

    def __init__(self, plain: Attention, parallel: TensorParallel) -> None:
        nn.Module.__init__(self)
        self.head_width, self.dropout = plain.head_width, plain.dropout
        self.q_proj, self.k_proj, self.v_proj = map(
            parallel.column, (plain.q_proj, plain.k_proj, plain.v_proj)
        )
        self.o_proj = parallel.row(plain.o_proj)
        self._randomness = parallel.randomness

    def forward(self, x_btd: Tensor) -> Tensor:
        projections = [self.q_proj, self.k_proj, self.v_proj]
        projected = column_parallel(x_btd, projections, self.q_proj.group, self.q_proj.sequence_parallel)
        with self._randomness.used(x_btd.device, self.dropout if self.training else 0.0):
            y_btd = self.attend(*projected)
        return self.o_proj(y_btd)


class OwnPositions(nn.Embedding):
    """Of the positions asked for, this rank's part; what pads a text has the last position."""

    def __init__(self, plain: nn.Embedding, group: Group) -> None:
        super().__init__(*plain.weight.shape, _weight=plain.weight.detach())
        self.weight, self._group = plain.weight, group

    def forward(self, positions_t: Tensor) -> Tensor:
        return super().forward(own_shard(positions_t, 0, self._group).clamp(max=self.num_embeddings - 1))
