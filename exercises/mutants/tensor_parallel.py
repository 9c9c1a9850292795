"""Wrong implementations of tensor and sequence parallelism."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from comm.collectives import all_reduce, broadcast
from comm.functions import (
    InFlightAllGather,
    InFlightReduceScatter,
    gather_from_ranks,
    own_shard,
    scatter_sums,
    split_to_ranks,
    sum_over_ranks,
    summed,
)
from exercises.mutants import mutant
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tensor_parallel.layers import own_rows


@mutant(
    target="tensor_parallel.layers.RowParallelLinear.forward",
    killer="tests.tensor_parallel.test_layers.test_the_bias_of_a_row_layer_is_added_once",
    cause="added up twice",
    symptom="A row layer's output is wrong, but only when its bias is not zero.",
)
def tensor_bias_on_every_rank(self, x: Tensor) -> Tensor:
    """A row layer's bias is added n times, which shows only when biases are not zero."""
    term = F.linear(x, self.weight, self.bias)
    if self.sequence_parallel:
        return scatter_sums(term, 1, self.group)
    return sum_over_ranks(term, self.group)


@mutant(
    target="tensor_parallel.layers.OverlappedColumn.backward",
    killer=(
        "tests.tensor_parallel.test_layers."
        "test_the_inputs_gradient_is_sent_while_the_weights_gradient_is_computed"
    ),
)
def tensor_column_gradient_not_hidden(ctx, *grads: Tensor):
    """Results are right but slow: the backward waits for the input gradient before it computes the
    weight's.
    """
    x, *weights = ctx.saved_tensors
    grad_x = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
    if ctx.sequence_parallel:
        x, grad_x = (
            InFlightAllGather(x, 1, ctx.group).wait(),
            InFlightReduceScatter(grad_x, 1, ctx.group).wait(),
        )
    else:
        grad_x = summed(grad_x, ctx.group)
    outputs = [grad.flatten(0, -2) for grad in grads]
    grad_weights = [grad.t() @ x.flatten(0, -2) for grad in outputs]
    grad_biases = [g.sum(0) if has else None for g, has in zip(outputs, ctx.has_bias, strict=True)]
    return grad_x, None, None, *grad_weights, *grad_biases


@mutant(
    target="tensor_parallel.layers.OverlappedColumn.backward",
    killer="tests.tensor_parallel.test_parallelize.test_two_ranks_have_the_gradients_of_one_process",
    cause="not added up over the ranks",
)
def tensor_column_gradient_not_reduced(ctx, *grads: Tensor):
    """Norms and embeddings drift apart: their gradients come from each rank's own attention heads only."""
    x, *weights = ctx.saved_tensors
    grad_x = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
    outputs = [grad.flatten(0, -2) for grad in grads]
    grad_weights = [grad.t() @ x.flatten(0, -2) for grad in outputs]
    grad_biases = [g.sum(0) if has else None for g, has in zip(outputs, ctx.has_bias, strict=True)]
    return grad_x, None, None, *grad_weights, *grad_biases


@mutant(
    target="tensor_parallel.parallelize.PositionsOfOwnTokens.forward",
    killer=(
        "tests.tensor_parallel.test_parallelize."
        "test_two_ranks_with_sequence_parallel_have_the_gradients_of_one_process"
    ),
)
def tensor_every_rank_at_the_first_position(self, positions_t: Tensor) -> Tensor:
    """With sequence parallel all ranks use the first positions: each counts its tokens from 0."""
    own = own_shard(positions_t, 0, self._group)
    return nn.functional.embedding(positions_t[: len(own)], self.weight)


@mutant(
    target="tensor_parallel.randomness.RankRandomness.used",
    killer=(
        "tests.tensor_parallel.test_dropout."
        "test_heads_of_different_ranks_have_different_masks_and_the_residual_stream_has_one"
    ),
)
@contextlib.contextmanager
def tensor_heads_share_a_mask(self, device, probability: float = 1.0) -> Iterator[None]:
    """Dropout regularises less: attention heads on different ranks drop the same numbers."""
    yield


@mutant(
    target="tensor_parallel.cross_entropy._CrossEntropy.forward",
    killer="tests.tensor_parallel.test_cross_entropy.test_huge_logits_do_not_overflow_wherever_the_largest_is",
)
def tensor_max_not_reduced(
    ctx, logits_tv: Tensor, targets: Tensor, vocab_size: int, group, ignore: int
) -> Tensor:
    """The loss is infinite when a logit on another rank is far above rank 0's largest logit."""
    largest = logits_tv.amax(-1)
    broadcast(largest, root=0, group=group)
    exps_tv = (logits_tv - largest.unsqueeze(-1)).exp()
    rows, is_own = own_rows(targets, logits_tv.shape[-1], vocab_size, group)
    at_target = logits_tv.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * is_own
    sums = torch.stack([exps_tv.sum(-1), at_target])
    all_reduce(sums, group=group)
    total, at_target = sums
    counts = targets != ignore
    ctx.save_for_backward(exps_tv, total, rows, is_own, counts)
    ctx.v, ctx.dtype = logits_tv.shape[-1], logits_tv.dtype
    return (total.log() + largest - at_target).where(counts, 0).sum() / counts.sum()


@mutant(
    target="tensor_parallel.parallelize.TensorParallel.clip_grad_norm_",
    killer="tests.tensor_parallel.test_parallelize.test_replicated_parameters_count_once_in_the_norm",
    cause="counted on each",
)
def tensor_norm_counts_replicas(self, max_norm: float) -> Tensor:
    """Clipping is too strong: the norm counts replicated parameters once for each rank."""
    gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
    total = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    all_reduce(total, group=self.group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient))
    return norm


@mutant(
    target="tensor_parallel.parallelize.TensorParallel.clip_grad_norm_",
    killer="tests.tensor_parallel.test_parallelize.test_replicated_parameters_count_once_in_the_norm",
    cause="one rank's part",
)
def tensor_norm_of_one_rank(self, max_norm: float) -> Tensor:
    """Replicated parameters drift apart: each rank clips by the norm of its own shards."""
    gradients = [p.grad for p in self.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient))
    return norm


@mutant(
    target="tensor_parallel.parallelize.TensorParallel.finish_gradient_sync",
    killer=(
        "tests.tensor_parallel.test_parallelize."
        "test_two_ranks_with_sequence_parallel_have_the_gradients_of_one_process"
    ),
    cause="not averaged over the ranks",
)
def tensor_norms_not_synchronised(self) -> None:
    """With sequence parallel norms and biases drift apart: their gradients come from a rank's own tokens
    only.
    """
    pass


@mutant(
    target="tensor_parallel.layers.VocabParallelEmbedding.forward",
    killer="tests.tensor_parallel.test_parallelize.test_two_ranks_have_the_gradients_of_one_process",
)
def tensor_other_ranks_tokens_embedded(self, tokens: Tensor) -> Tensor:
    """Embeddings are wrong: each rank adds its first row for every token that another rank owns."""
    mine, _ = own_rows(tokens, len(self.weight), self.vocab_size, self.group)
    term = F.embedding(mine, self.weight)
    return scatter_sums(term, 1, self.group) if self.sequence_parallel else sum_over_ranks(term, self.group)


@mutant(
    target="tensor_parallel.parallelize.TensorParallel.loss",
    killer="tests.tensor_parallel.test_parallelize.test_two_ranks_have_the_gradients_of_one_process",
)
def tensor_padding_gets_probability(self, logits_btw: Tensor, targets_bt: Tensor) -> Tensor:
    """The loss is slightly too large: the padding of the vocabulary gets a share of the probability."""
    return vocab_parallel_cross_entropy(logits_btw, targets_bt, None, self.group)


@mutant(
    target="tensor_parallel.randomness.RankRandomness.used",
    killer=(
        "tests.tensor_parallel.test_dropout.test_blocks_computed_again_in_the_backward_draw_the_same_masks"
    ),
)
@contextlib.contextmanager
def tensor_recomputed_with_other_masks(self, device, probability: float = 1.0) -> Iterator[None]:
    """Gradients are wrong with dropout and recomputation: heads get other masks in the second forward."""
    if not probability:
        yield
        return
    shared = torch.get_rng_state()
    if not hasattr(self, "_own"):
        torch.manual_seed(torch.initial_seed() + 1 + self._rank)
    else:
        torch.set_rng_state(self._own)
    try:
        yield
    finally:
        self._own = torch.get_rng_state()
        torch.set_rng_state(shared)


@mutant(
    target="tensor_parallel.randomness.RankRandomness.__init__",
    killer=(
        "tests.tensor_parallel.test_dropout."
        "test_heads_of_different_ranks_have_different_masks_and_the_residual_stream_has_one"
    ),
)
def tensor_residual_masks_differ(self, group, device) -> None:
    """The residual stream differs by rank: each rank draws its dropout masks from another seed."""
    self._rank = dist.get_rank(group)
    torch.manual_seed(1234 + self._rank)


@mutant(
    target="tensor_parallel.layers.RowParallelLinear.forward",
    killer="tests.tensor_parallel.test_parallelize.test_two_ranks_have_the_gradients_of_one_process",
)
def tensor_row_gathers_its_outputs(self, x: Tensor) -> Tensor:
    """Ranks agree, the loss falls, and it is wrong: a row layer's output uses an n-th of the layer's
    inputs.
    """
    term = F.linear(x, self.weight)
    if self.sequence_parallel:
        y = scatter_sums(term, 1, self.group)
    else:
        own = split_to_ranks(term, -1, self.group)
        y = gather_from_ranks(own, -1, self.group, term.shape[-1])
    return y if self.bias is None else y + self.bias.to(y.dtype)
