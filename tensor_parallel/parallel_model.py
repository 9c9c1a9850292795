"""Wrap a model whose layers are divided among ranks: complete its gradients, put its shards together.

A parameter that every rank holds in full, and applies to the same tokens, has the same gradient on every
rank. With sequence parallelism each rank has seen only its shard of the tokens, so its gradients of norms,
positions and of biases that follow a sum are only terms. `finish_gradient_sync()` adds the terms up.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from comm.chosen_pattern import chosen_pattern
from comm.collectives import Group, all_reduce
from comm.functions import InFlightAllGather, own_shard
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, MLP, FeedForward, loss_of
from lab.trace.ledger import Traffic
from tensor_parallel.accumulation import PartialGradients
from tensor_parallel.arguments import the_tensor_of
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tensor_parallel.expected_traffic import (
    ExpectedGPTTraffic,
    ExpectedMLPTraffic,
    ExpectedTraffic,
    parts_of,
)
from tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, pad_vocabulary
from tensor_parallel.randomness import RankRandomness
from training.clipping import clip_grad_norm_
from training.gradient_part import GradientPart


class TensorParallel(nn.Module):
    """A model whose layers are divided among the ranks of `group`; `parallelize` makes it.

    A GPT returns this rank's shard of the logits, (batch, time, vocabulary/n), and an MLP its full output:
    compute the loss from it with `loss`. Call `finish_gradient_sync()` after the backward: it makes
    every gradient complete. Afterwards torch's own clip_grad_norm_ and GradScaler see one gradient of all
    ranks, too.

    Second derivatives, and optimizers that have stepped before, are not supported.
    """

    def __init__(self, module: nn.Module, group: Group, sequence_parallel: bool, overlap: bool) -> None:
        super().__init__()
        self.module, self.group = module, group
        self.sequence_parallel, self.overlap = sequence_parallel, overlap
        self.randomness = RankRandomness(group)
        self._sharded: dict[nn.Parameter, tuple[int, int]] = {}  # along which dim, and its full size there
        self.dims: dict[str, tuple[int, int]] = {}  # the same by name
        self._mlp_sizes = module.sizes if isinstance(module, MLP) else ()
        self._partial, self._pattern = PartialGradients(), chosen_pattern("all_reduce", group)

    def shard(self, parameter: nn.Parameter, dim: int, padded: Tensor | None = None) -> nn.Parameter:
        """Replace the parameter's values by this rank's shard. The object stays, so an optimizer keeps it."""
        if not isinstance(parameter, nn.Parameter):
            raise WorkbookError(
                "A weight that is computed from others cannot be divided: remove parametrizations."
            )
        self._sharded[parameter] = dim, parameter.shape[dim]
        full = parameter.detach() if padded is None else padded
        parameter.grad, parameter.data = None, own_shard(full, dim, self.group).clone()
        return parameter

    def column(
        self, plain: nn.Linear, gather_output: bool = False, is_vocabulary: bool = False
    ) -> ColumnParallelLinear:
        """Return the layer divided by its outputs. With `is_vocabulary` these are padded."""
        ranks = dist.get_world_size(self.group)
        layer = ColumnParallelLinear(
            1, ranks, False, self.group, self.sequence_parallel, gather_output, overlap=self.overlap
        )
        for name, parameter in (("weight", plain.weight), ("bias", plain.bias)):
            if parameter is not None and parameter not in self._sharded:
                padded = pad_vocabulary(parameter.detach(), self.group) if is_vocabulary else None
                self.shard(parameter, 0, padded)
            setattr(layer, name, parameter)
        return layer

    def row(self, plain: nn.Linear) -> RowParallelLinear:
        """Return the layer divided by its inputs."""
        ranks = dist.get_world_size(self.group)
        layer = RowParallelLinear(ranks, 1, False, self.group, self.sequence_parallel)
        layer.weight = self.shard(plain.weight, 1)
        layer.bias = plain.bias
        return layer

    def name_shards(self) -> None:
        """Note by name which parameters are shards, once all layers are divided."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        self.dims = {name: self._sharded[p] for name, p in parameters.items() if p in self._sharded}
        self._sharded.clear()

    def _with_own_tokens_only(self) -> list[nn.Parameter]:
        """Return the replicated parameters whose gradient covers only this rank's tokens."""
        named = self.module.named_parameters() if self.sequence_parallel else ()
        return [parameter for name, parameter in named if name not in self.dims]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = the_tensor_of(args, kwargs)
        time = x.shape[1] if isinstance(self.module, GPT) else 0
        if self.sequence_parallel:
            longest = self.module.position_embedding.num_embeddings
            if time > longest:
                raise ValueError(f"{time} tokens in a row exceed block_size {longest}")
            # Under a causal mask, tokens at the end change nothing before them.
            x = F.pad(x, (0, -time % dist.get_world_size(self.group)))
        y = self.module(x)
        return y[:, :time] if self.sequence_parallel else y

    def loss(self, logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
        """Return the cross entropy in nats, the mean over all targets; the same on every rank."""
        if not isinstance(self.module, GPT):
            return loss_of(logits_btv, targets_bt)  # of an MLP's full output
        return vocab_parallel_cross_entropy(logits_btv, targets_bt, self.module.config.vocab_size, self.group)

    def finish_gradient_sync(self) -> None:
        """Add up the gradients of which each rank has one term, from all backwards since the last call."""
        with self._partial.completing(self._with_own_tokens_only()) as gradients:
            if gradients:
                total = torch.cat([gradient.flatten() for gradient in gradients])
                all_reduce(total, group=self.group, pattern=self._pattern)
                sums = total.split([gradient.numel() for gradient in gradients])
                for gradient, sum_ in zip(gradients, sums, strict=True):
                    gradient.copy_(sum_.view_as(gradient))
        for name, parameter in self.module.named_parameters():
            if name in self.dims and type(parameter.grad) is Tensor:
                parameter.grad = GradientPart.of(parameter.grad, self.group, self._pattern)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip as torch's clip_grad_norm_ does on the full model: shards add up, replicas count once."""
        named = dict(self.module.named_parameters())
        replicated = {parameter for name, parameter in named.items() if name not in self.dims}
        return clip_grad_norm_(named.values(), max_norm, self.group, self._pattern, replicated)

    def traffic_per_block(self, batch: int, time: int) -> Traffic:
        """Return this rank's expected traffic for one block of a GPT, forward and backward."""
        return self.expected_traffic().of_parts((batch, time), ["blocks.0"])

    def traffic_per_step(self, batch: int, time: int, is_clipped: bool = False) -> Traffic:
        """Return this rank's expected traffic for a step of a GPT: all layers, loss and gradients."""
        expected, names = self.expected_traffic(), self.module.state_dict()
        summed = sum(parameter.numel() for parameter in self._with_own_tokens_only())
        norm = expected.sum([("all_reduce", 1)] * is_clipped, itemsize=8)
        return expected.of_parts((batch, time), parts_of(names)) + expected.of_gradients(summed) + norm

    def expected_traffic(self, computed_itemsize: int | None = None) -> ExpectedTraffic:
        """Return the formulas of what this rank sends; for `computed_itemsize` None as without autocast."""
        itemsize = next(self.module.parameters()).itemsize
        place = self.group, itemsize, itemsize if computed_itemsize is None else computed_itemsize
        if isinstance(self.module, GPT):
            config = self.module.config
            has_mlps = any(isinstance(block.mlp, FeedForward) for block in self.module.blocks)
            return ExpectedGPTTraffic(*place, config, self.sequence_parallel, self.overlap, has_mlps)
        return ExpectedMLPTraffic(*place, self._mlp_sizes)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the plain model, full on every rank; every rank must call it."""
        return {name: self.full_tensor(name, shard) for name, shard in self.module.state_dict().items()}

    def full_tensor(self, name: str, shard: Tensor) -> Tensor:
        """Return a copy of what all ranks together hold of the parameter `name`; every rank must call it."""
        if name not in self.dims:
            return shard.clone()
        dim, size = self.dims[name]
        return InFlightAllGather(shard, dim, self.group).wait().narrow(dim, 0, size).clone()

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load this rank's shards of a plain model's state dict."""
        self.module.load_state_dict({name: self.shard_of(name, tensor) for name, tensor in state.items()})

    def shard_of(self, name: str, full: Tensor) -> Tensor:
        """Return what this rank holds of the full tensor that belongs to the parameter `name`."""
        if name not in self.dims:
            return full
        dim, _ = self.dims[name]
        is_padded = name in ("token_embedding.weight", "head.weight", "head.bias")
        return own_shard(pad_vocabulary(full, self.group) if is_padded else full, dim, self.group)
