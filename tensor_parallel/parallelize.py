"""Make a plain GPT or MLP tensor parallel: replace its layers by layers that are divided among the ranks.

      plain                      tensor parallel                        with sequence parallelism
      token_embedding            by vocabulary entries, an all-reduce   a reduce-scatter of tokens
      norms, dropout, residual   the same on every rank                 each rank its shard of the tokens
      q_proj k_proj v_proj       by columns: an n-th of the heads       an all-gather of tokens first
      o_proj                     by rows, an all-reduce                 a reduce-scatter of tokens
      up_proj, down_proj         by columns, by rows                    the same as q_proj and o_proj
      head                       by columns: an n-th of the logits      an all-gather of tokens first

The layers are in layers.py. parallel_model.py completes the gradients after the backward.
"""

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import Group, broadcast
from comm.functions import own_shard
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, MLP, Attention, FeedForward
from tensor_parallel.layers import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
    pad_vocabulary,
    validate_divisible,
)
from tensor_parallel.parallel_model import TensorParallel
from tensor_parallel.randomness import RankDropout


def parallelize(
    model: nn.Module, group: Group = None, sequence_parallel: bool = False, overlap: bool = True
) -> TensorParallel:
    """Divide a plain GPT or MLP of `lab` among the ranks, in place; weights and random seed become rank 0's.

    `overlap` hides the reductions in the backward of column layers (overlapped.py). The model keeps its
    parameter objects, so an optimizer may be made before. Raises WorkbookError where the number of ranks
    does not divide heads or widths; a vocabulary is padded.
    """
    _validate(model, group, sequence_parallel)
    for tensor in [*model.parameters(), *model.buffers()]:
        broadcast(tensor.data, root=0, group=group)
    model.zero_grad()
    parallel = TensorParallel(model, group, sequence_parallel, overlap)
    if isinstance(model, GPT):
        _divide_gpt(model, parallel)
    else:
        _divide_mlp(model, parallel)
    parallel.name_shards()
    return parallel


def _divide_mlp(model: MLP, parallel: TensorParallel) -> None:
    for i, layer in enumerate(model.layers):
        is_last = i == len(model.layers) - 1
        model.layers[i] = parallel.row(layer) if i % 2 else parallel.column(layer, gather_output=is_last)


def _divide_gpt(model: GPT, parallel: TensorParallel) -> None:
    config, ranks = model.config, dist.get_world_size(parallel.group)
    weight = model.token_embedding.weight
    embedding = VocabParallelEmbedding(ranks, 1, parallel.group, parallel.sequence_parallel)
    embedding.vocab_size = config.vocab_size
    embedding.weight = parallel.shard(weight, 0, pad_vocabulary(weight.detach(), parallel.group))
    model.token_embedding, model.head = embedding, parallel.column(model.head, is_vocabulary=True)
    for block in model.blocks:
        block.attention = ParallelAttention(block.attention, parallel)
        for mlp in [module for module in block.mlp.modules() if isinstance(module, FeedForward)]:
            mlp.up_proj, mlp.down_proj = parallel.column(mlp.up_proj), parallel.row(mlp.down_proj)
    if parallel.sequence_parallel:
        # A text of block_size tokens may have to be padded.
        model.config = replace(config, block_size=config.block_size + -config.block_size % ranks)
        model.position_embedding = PositionsOfOwnTokens(model.position_embedding, parallel.group)
        for module in (model, *model.blocks):
            module.dropout = RankDropout(module.dropout.p, parallel.randomness)


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
        q, k, v = column_parallel(x_btd, [self.q_proj, self.k_proj, self.v_proj])
        # Each rank has heads of its own, so each draws its own dropout mask.
        with self._randomness.used(x_btd.device, self.dropout if self.training else 0.0):
            y_btd = self.attend(q, k, v)
        return self.o_proj(y_btd)


class PositionsOfOwnTokens(nn.Embedding):
    """A position embedding that looks up this rank's shard of the positions; padding gets the last one."""

    def __init__(self, plain: nn.Embedding, group: Group) -> None:
        super().__init__(*plain.weight.shape, _weight=plain.weight.detach())
        self.weight, self._group = plain.weight, group

    def forward(self, positions_t: Tensor) -> Tensor:
        return super().forward(own_shard(positions_t, 0, self._group).clamp(max=self.num_embeddings - 1))


def _validate(model: nn.Module, group: Group, sequence_parallel: bool) -> None:
    """Raise WorkbookError if the model cannot be divided, before anything of it is changed."""
    if not isinstance(model, GPT | MLP) or (sequence_parallel and isinstance(model, MLP)):
        what = "An MLP has no tokens to divide" if isinstance(model, MLP) else f"not a {type(model).__name__}"
        raise WorkbookError(f"parallelize takes a GPT, or an MLP without sequence parallelism: {what}.")
    if any(isinstance(module, ColumnParallelLinear) for module in model.modules()):
        raise WorkbookError("The model is tensor parallel already: parallelize a plain one.")
    if isinstance(model, GPT):
        validate_divisible("query heads", model.config.num_heads, group)
        validate_divisible("key and value heads", model.config.kv_heads, group)
    else:
        for i, layer in enumerate(model.layers):
            outputs, inputs = ("outputs", layer.out_features), ("inputs", layer.in_features)
            validate_divisible(*(inputs if i % 2 else outputs), group)
