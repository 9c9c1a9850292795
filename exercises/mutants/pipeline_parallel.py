"""Wrong implementations of pipelines."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from comm.point_to_point import irecv, isend, recv, send
from exercises.mutants import mutant
from lab.trace.timeline import span
from pipeline_parallel.actions import FORWARD, WEIGHT_GRADIENT, Table, placement
from pipeline_parallel.deferred import add_to
from pipeline_parallel.messages import Message, received_by


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.input_gradient_of",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_1f1b_holds_no_more_microbatches_than_ranks_come_after"
    ),
)
def pipeline_activations_kept(self, microbatch: int, stage: int, dy: Tensor | None) -> Tensor | None:
    """1F1B needs as much memory as GPipe: activations are kept after the backward that has used them."""
    x, edge = self.kept[microbatch, stage]
    if edge is not None:
        torch.autograd.backward([edge], [dy], retain_graph=True)
    return x.grad


@mutant(
    target="pipeline_parallel.deferred.SplitLinear.backward",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_a_split_backward_computes_every_weights_gradient_once"
    ),
    cause="is it not computed",
)
def pipeline_bias_not_deferred(ctx, dy):
    """With split backwards biases do not learn: only the gradients of the weights are computed."""
    (x,), weight = ctx.saved_tensors, ctx.weight
    ctx.later.append(lambda: add_to(weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)))
    return None, dy @ weight if ctx.needs_input_grad[1] else None, None, None


@mutant(
    target="pipeline_parallel.train_afab.AllForwardAllBackward.step",
    killer="tests.pipeline_parallel.test_narrated.test_gpipe_by_hand_equals_one_process",
    symptom="With GPipe by hand the loss is right, and the gradients are wrong.",
)
def pipeline_by_hand_gradients_in_reverse(self, x: Tensor, y: Tensor) -> Tensor | None:
    """Gradients are wrong: ranks run the backwards in different orders and mix up the microbatches."""
    self.begin_step(x, y)
    rank, stage, m = self.rank, self.stages[str(self.rank)], self.microbatches
    is_first, is_last = rank == 0, rank == self.last
    losses, leaving, kept = [], [], []
    for i, (x_i, y_i) in enumerate(zip(x.chunk(m), y.chunk(m), strict=True)):
        given = x_i
        if not is_first:
            given = torch.empty_like(self.boundaries[rank], device=self.device)
            recv(given, rank - 1)
            given.requires_grad_()
        with span(str(i), "forward", action="F", microbatch=i, stage=rank):
            made = stage(given, y_i) / m if is_last else stage(given)
        if is_last:
            losses.append(made.detach())
        else:
            leaving.append(isend(made.detach(), rank + 1))
        kept.append((given, made))
    for i in range(m):
        given, made = kept[i] if is_last else kept.pop()
        gradient = None
        if not is_last:
            gradient = torch.empty_like(made)
            recv(gradient, rank + 1)
        with span(str(i), "backward", action="B", microbatch=i, stage=rank):
            made.backward(gradient)
        if not is_first:
            leaving.append(isend(given.grad, rank - 1))
    for transfer in leaving:
        transfer.wait()
    return torch.stack(losses).sum() if is_last else None


@mutant(
    target="pipeline_parallel.train_model_parallel.ModelParallel.step",
    killer="tests.pipeline_parallel.test_narrated.test_model_parallel_equals_one_process",
)
def pipeline_by_hand_sends_the_activation_back(self, x: Tensor, y: Tensor) -> Tensor | None:
    """All stages but the last learn nonsense: an activation is sent back instead of its gradient."""
    self.begin_step(x, y)
    rank, stage, m = self.rank, self.stages[str(self.rank)], self.microbatches
    is_first, is_last = rank == 0, rank == self.last
    losses = []
    for i, (x_i, y_i) in enumerate(zip(x.chunk(m), y.chunk(m), strict=True)):
        given = x_i
        if not is_first:
            given = torch.empty_like(self.boundaries[rank], device=self.device)
            recv(given, rank - 1)
            given.requires_grad_()
        with span(str(i), "forward", action="F", microbatch=i, stage=rank):
            made = stage(given, y_i) / m if is_last else stage(given)
        gradient = None
        if is_last:
            losses.append(made.detach())
        else:
            send(made.detach(), rank + 1)
            gradient = torch.empty_like(made)
            recv(gradient, rank + 1)
        with span(str(i), "backward", action="B", microbatch=i, stage=rank):
            made.backward(gradient)
        if not is_first:
            send(given.detach(), rank - 1)
    return torch.stack(losses).sum() if is_last else None


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.clip_grad_norm_",
    killer="tests.pipeline_parallel.test_mutant_killers.test_the_norm_is_that_of_all_stages",
)
def pipeline_clipped_by_the_local_norm(self, max_norm: float) -> Tensor:
    """Layers learn at different rates: each rank clips its stages by the norm of their gradients only."""
    gradients = [p.grad for p in self.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient))
    return norm


@mutant(
    target="pipeline_parallel.own_stages.OwnStages.finish_gradient_sync",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_tied_gradients_are_exchanged_whether_the_number_of_ranks_is_odd_or_even"
    ),
    cause="deadlock",
    fails_with="waited until the timeout",
)
def pipeline_deadlock_on_an_even_number_of_ranks(self) -> None:
    """With tied weights training hangs on 2 or 4 ranks but not on 3: two ranks wait for each other to
    receive.
    """
    for copy, peer in self.tied:
        theirs = torch.empty_like(copy)
        hops = (peer - self.rank) % (1 + max(self.rank_of.values()))
        if hops % 2 == 1:
            send(copy.grad, peer, self.group)
            recv(theirs, peer, self.group)
        else:
            recv(theirs, peer, self.group)
            send(copy.grad, peer, self.group)
        copy.grad += theirs
    self._is_complete = True


@mutant(
    target="pipeline_parallel.own_stages.OwnStages.finish_gradient_sync",
    killer="tests.pipeline_parallel.test_mutant_killers.test_a_frozen_embedding_gets_no_gradient",
)
def pipeline_frozen_gets_zeros(self) -> None:
    """Weight decay shrinks a frozen tied embedding: its gradient is zeros instead of none."""
    for copy, peer in self.tied:
        gradient = torch.zeros_like(copy) if copy.grad is None else copy.grad
        theirs = torch.empty_like(gradient)
        arriving = irecv(theirs, peer, self.channels.of(peer, self.rank))
        leaving = isend(gradient, peer, self.channels.of(self.rank, peer))
        arriving.wait()
        leaving.wait()
        copy.grad = gradient.add_(theirs)
    self._is_complete = True


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.compute",
    killer="tests.pipeline_parallel.test_mutant_killers.test_full_backwards_may_stand_beside_split_ones",
    cause="is it not computed",
)
def pipeline_full_backward_forgets_weights(self, action, given, xs, ys):
    """With some backwards split and others not, the stages with full backwards do not learn."""
    kind, microbatch, stage = action
    if kind == FORWARD:
        x = xs[microbatch] if given is None else given.requires_grad_()
        return self.forward_of(microbatch, stage, x, ys[microbatch] if stage == self.last else None)
    if kind == WEIGHT_GRADIENT:
        return self.weight_gradient_of(microbatch, stage)
    dx = self.input_gradient_of(microbatch, stage, given)
    if kind == "B":
        self.later.pop((microbatch, stage))
    return dx


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.input_gradient_of",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_a_stage_between_others_hands_back_the_gradient_of_its_own_input"
    ),
)
def pipeline_input_gradient_piles_up(self, microbatch: int, stage: int, dy: Tensor | None) -> Tensor | None:
    """A stage sends gradients that are too large: those of earlier microbatches are added to each of them."""
    x, edge = self.kept.pop((microbatch, stage))
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    before = getattr(self, "_before", None)
    self._before = x.grad if before is None or x.grad is None else x.grad + before
    return self._before


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.input_gradient_of",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_a_backward_uses_the_activations_of_its_own_microbatch"
    ),
)
def pipeline_last_microbatchs_activations(
    self, microbatch: int, stage: int, dy: Tensor | None
) -> Tensor | None:
    """With several microbatches gradients are wrong: each backward uses the last forward's activations."""
    x, edge = self.kept.popitem()[1]
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    return x.grad


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.forward_of",
    killer="tests.pipeline_parallel.test_mutant_killers.test_the_loss_is_the_mean_over_all_microbatches",
    cause="where a mean is due",
)
def pipeline_loss_not_divided(self, microbatch: int, stage: int, x: Tensor, target: Tensor | None) -> Tensor:
    """With many microbatches training diverges: gradients are too large by the number of microbatches."""
    later = self.later[microbatch, stage] = []
    y = self.stages[str(stage)](x, target, later if self.is_split else None)
    self.kept[microbatch, stage] = x, get_gradient_edge(y) if y.requires_grad else None
    return y.detach()


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.hand_over",
    killer="tests.pipeline_parallel.test_mutant_killers.test_the_loss_is_the_mean_over_all_microbatches",
    cause="only the last one used",
    symptom="The printed loss is noisy and too small, and training is right.",
)
def pipeline_loss_of_the_last_microbatch(self, message: Message | None, made: Tensor, losses: Any) -> None:
    """The printed loss is noisy and too small: it has only the last microbatch's part of the mean."""
    if message is None:
        losses[:] = [made]
    elif (to := self.rank_of[message.receiver]) == self.rank:
        self.ready[message] = made
    else:
        self.leaving[message] = isend(made.contiguous(), to, self.channels.of(self.rank, to))


@mutant(
    target="pipeline_parallel.messages.receives_before",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers.test_messages_meet_the_receives_that_are_meant_for_them"
    ),
)
def pipeline_receives_in_order_of_need(table: Table, rank: int, ahead: int = 2) -> list[list[Message]]:
    """Stages receive the wrong tensors of the right shape: receives are not in the order of the sends."""
    rank_of = placement(table)
    needed = [received_by(action, max(rank_of)) for action in table[rank]]
    return [[message] if message is not None and rank_of[message.stage] != rank else [] for message in needed]


@mutant(
    target="pipeline_parallel.stage.Stage.forward",
    killer="tests.pipeline_parallel.test_mutant_killers.test_recomputation_drops_out_the_same",
)
def pipeline_recomputed_with_other_masks(self, x: Tensor, target: Tensor | None = None, later=None) -> Tensor:
    """With recomputation and dropout gradients are wrong: the second forward draws other dropout masks."""
    if self.recompute and torch.is_grad_enabled():
        return checkpoint(self._compute, x, target, later, use_reentrant=False, preserve_rng_state=False)
    return self._compute(x, target, later)


@mutant(
    target="pipeline_parallel.own_stages.OwnStages.finish_gradient_sync",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers.test_both_copies_of_a_tied_embedding_get_both_gradients"
    ),
    cause="divided by their number once too often",
)
def pipeline_tied_averaged(self) -> None:
    """A tied embedding learns at half the rate: its two gradients are averaged instead of added."""
    for copy, peer in self.tied:
        theirs = torch.empty_like(copy)
        arriving = irecv(theirs, peer, self.channels.of(peer, self.rank))
        leaving = isend(copy.grad, peer, self.channels.of(self.rank, peer))
        arriving.wait()
        leaving.wait()
        copy.grad = (copy.grad + theirs) / 2
    self._is_complete = True


@mutant(
    target="pipeline_parallel.own_stages.OwnStages._make_copies_equal",
    killer="tests.pipeline_parallel.test_mutant_killers.test_tied_copies_are_equal_before_the_first_step",
    cause="not started from rank 0's values",
    symptom="The two copies of a tied weight differ from the first step on.",
)
def pipeline_tied_copies_differ(self) -> None:
    """Tied weights differ from the first step on: what the second rank receives goes into a clone of its
    copy.
    """
    for copy, peer in self.tied:
        received = copy.detach().clone()
        if self.rank < peer:
            send(copy, peer, self.channels.of(self.rank, peer))
        else:
            recv(received, peer, self.channels.of(peer, self.rank))


@mutant(
    target="pipeline_parallel.own_stages.OwnStages.finish_gradient_sync",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers.test_both_copies_of_a_tied_embedding_get_both_gradients"
    ),
    symptom="The embedding and the head share a weight, and after some steps they do not.",
)
def pipeline_tied_not_synchronised(self) -> None:
    """Each rank trains its own copy of a shared weight: the sum of both gradients is not stored in .grad."""
    for copy, peer in self.tied:
        gradient = copy.grad.clone()
        theirs = torch.empty_like(gradient)
        arriving = irecv(theirs, peer, self.channels.of(peer, self.rank))
        leaving = isend(gradient, peer, self.channels.of(self.rank, peer))
        arriving.wait()
        leaving.wait()
        gradient.add_(theirs)
    self._is_complete = True


@mutant(
    target="pipeline_parallel.deferred.compute_gradients",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_a_split_backward_computes_every_weights_gradient_once"
    ),
    cause="is it not computed",
)
@torch.no_grad()
def pipeline_weight_gradient_of_the_last_layer(later) -> None:
    """Only one layer of a stage learns: the loop over the deferred gradients ends too early."""
    if later:
        later.pop()()
    later.clear()


@mutant(
    target="pipeline_parallel.deferred.SplitLinear.backward",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_a_split_backward_computes_every_weights_gradient_once"
    ),
    cause="added up twice",
)
def pipeline_weight_gradient_twice(ctx, dy):
    """With zero bubble schedules weight gradients are twice too large: the input backward computes them
    too.
    """
    (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
    rows_of_dy, rows_of_x = dy.flatten(0, -2), x.flatten(0, -2)

    def weights() -> None:
        add_to(weight, rows_of_dy.t() @ rows_of_x)
        if bias is not None:
            add_to(bias, rows_of_dy.sum(0))

    ctx.later.append(weights)
    return None, dy @ weight, rows_of_dy.t() @ rows_of_x, None if bias is None else rows_of_dy.sum(0)


@mutant(
    target="pipeline_parallel.deferred.compute_gradients",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_when_weight_gradients_are_computed_nothing_they_needed_is_left"
    ),
)
def pipeline_weight_gradient_with_a_graph(later) -> None:
    """Memory grows in every step: weight gradients are computed with a graph, which keeps their inputs."""
    while later:
        later.pop()()


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.input_gradient_of",
    killer="tests.pipeline_parallel.test_mutant_killers.test_gradients_of_the_microbatches_add_up",
    cause="cleared",
    symptom="With more microbatches the gradients of a batch become smaller.",
)
def pipeline_zeroed_between_microbatches(
    self, microbatch: int, stage: int, dy: Tensor | None
) -> Tensor | None:
    """Only the last microbatch trains the model: each backward clears the gradients of the earlier ones."""
    x, edge = self.kept.pop((microbatch, stage))
    self.stages[str(stage)].zero_grad()
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    return x.grad
