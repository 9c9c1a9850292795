"""Wrong implementations of pipelines."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from comm import point_to_point
from comm.point_to_point import irecv, isend, recv, send
from exercises.mutants import mutant
from pipeline_parallel.actions import FORWARD, Table, placement
from pipeline_parallel.deferred import _add_to
from pipeline_parallel.messages import Receive, Send, Step, WaitForSend, received_by, sent_by
from pipeline_parallel.stage_runner import AutogradRunner
from pipeline_parallel.train_afab import AllForwardAllBackward
from pipeline_parallel.train_model_parallel import ModelParallel
from training.clipping import clip_grad_norm_


@mutant(
    target="pipeline_parallel.stage_runner.AutogradRunner.backward_input",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_1f1b_holds_no_more_microbatches_than_ranks_come_after"
    ),
    cause="kept",
)
def pipeline_activations_kept(self, microbatch: int, dy):
    """1F1B needs as much memory as GPipe: activations are kept after the backward that has used them."""
    x, edge = self._begun[microbatch]
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    return x.grad


@mutant(
    target="pipeline_parallel.deferred._Linear.backward",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_a_split_backward_computes_every_weights_gradient_once"
    ),
    cause="is it not computed",
)
def pipeline_bias_not_deferred(ctx, dy):
    """With split backwards biases do not learn: only the gradients of the weights are computed."""
    (x,), weight = ctx.saved_tensors, ctx.weight
    ctx.deferred.add(lambda: _add_to(weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)), x, dy)
    return None, dy @ weight if ctx.needs_input_grad[1] else None, None, None


@mutant(
    target="pipeline_parallel.train_afab.AllForwardAllBackward",
    killer="tests.pipeline_parallel.test_narrated.test_gpipe_by_hand_equals_one_process",
    symptom="With GPipe by hand the loss is right, and the gradients are wrong.",
)
class pipeline_by_hand_gradients_in_reverse(AllForwardAllBackward):
    """Gradients are wrong: ranks run the backwards in different orders and mix up the microbatches."""

    def post_receives(self, like: Tensor, peer: int):
        posted = super().post_receives(like, peer)
        return posted[::-1] if peer > self.rank else posted


@mutant(
    target="pipeline_parallel.train_afab.AllForwardAllBackward",
    killer="tests.pipeline_parallel.test_narrated.test_gpipe_by_hand_equals_one_process",
    cause="where a mean is due",
)
class pipeline_by_hand_loss_not_divided(AllForwardAllBackward):
    """GPipe's gradients are too large by the number of microbatches: losses are summed, not averaged."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        mean, microbatches = self.loss_of, self.microbatches
        self.loss_of = lambda y, target: mean(y, target) * microbatches


@mutant(
    target="pipeline_parallel.train_model_parallel.ModelParallel",
    killer="tests.pipeline_parallel.test_narrated.test_model_parallel_equals_one_process",
)
class pipeline_by_hand_sends_the_activation_back(ModelParallel):
    """All stages but the last learn nonsense: an activation is sent back instead of its gradient."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        received = []

        def recv(tensor, src: int) -> None:
            point_to_point.recv(tensor, src)
            received.append(tensor)

        def send(tensor, dst: int) -> None:
            point_to_point.send(
                tensor if dst > self.rank else received[-1 if self.output_like is None else -2], dst
            )

        self.messages = SimpleNamespace(send=send, recv=recv)


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.clip_grad_norm_",
    killer="tests.pipeline_parallel.test_plausible_use.test_the_norm_is_that_of_all_stages",
    cause="one rank's part",
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
    target="pipeline_parallel.split.costs_of",
    killer="tests.pipeline_parallel.test_split.test_costs_of_another_number_than_parts_lose_no_layer",
    cause="left out",
    symptom="With a list of costs that is too short, a pipeline trains a smaller model, without an error.",
)
def pipeline_costs_too_few_drop_layers(model, parts, costs):
    """With a list of costs that is too short, the last layers are missing in the pipeline."""
    return [part.cost for part in parts] if costs is None else list(costs)


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.finish_gradient_sync",
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
    for mine, peer in self._shared():
        others = torch.empty_like(mine.grad)
        hops = (peer - self.rank) % len(self.table)
        if hops % 2 == 1:
            send(mine.grad, peer, self.group)
            recv(others, peer, self.group)
        else:
            recv(others, peer, self.group)
            send(mine.grad, peer, self.group)
        mine.grad += others


@mutant(
    target="pipeline_parallel.failure.SharedFailure.end_step_on_all",
    killer=(
        "tests.pipeline_parallel.test_forward_only."
        "test_an_error_in_the_last_stage_reaches_the_ranks_before_it"
    ),
)
def pipeline_evaluation_fails_alone(self) -> Exception | None:
    """An error in the last stage of an evaluation is raised there only, and the others hang in the next
    step.
    """
    return self.end_step()


@mutant(
    target="pipeline_parallel.pipeline.Pipeline._shared",
    killer="tests.pipeline_parallel.test_mutant_killers.test_a_frozen_embedding_gets_no_gradient",
)
def pipeline_frozen_gets_zeros(self):
    """Weight decay shrinks a frozen tied embedding: its gradient is zeros instead of none."""
    return [
        (self.stages[str(stage)].get_parameter(name), self.rank_of[other])
        for tie in self.ties
        for (stage, name), (other, _) in (tie, tie[::-1])
        if self.rank_of[stage] == self.rank
    ]


@mutant(
    target="pipeline_parallel.stage_runner.AutogradRunner.backward",
    killer="tests.pipeline_parallel.test_mutant_killers.test_full_backwards_may_stand_beside_split_ones",
    cause="is it not computed",
)
def pipeline_full_backward_forgets_weights(self, microbatch: int, dy):
    """With some backwards split and others not, the stages with full backwards do not learn."""
    return self.backward_input(microbatch, dy)


@mutant(
    target="pipeline_parallel.stage_runner.AutogradRunner.backward_input",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_a_stage_between_others_hands_back_the_gradient_of_its_own_input"
    ),
)
def pipeline_input_gradient_piles_up(self, microbatch: int, dy):
    """A stage sends gradients that are too large: those of earlier microbatches are added to each of them."""
    x, edge = self._begun.pop(microbatch)
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    before = getattr(self, "_before", None)
    self._before = x.grad if before is None or x.grad is None else x.grad + before
    return self._before


@mutant(
    target="pipeline_parallel.executor.Executor._hand_over",
    killer="tests.pipeline_parallel.test_mutant_killers.test_full_backwards_may_stand_beside_split_ones",
    symptom="The gradients of a stage's input are right, but they belong to other rows of the batch.",
)
def pipeline_input_gradients_as_they_come(self, action, made) -> None:
    """Rows of the input gradient are in the order of the backwards, not in the order of the batch."""
    message = sent_by(action, self.last_stage)
    if message is not None and made is not None:
        self._ready[message] = made
    elif made is not None and action.kind == FORWARD:
        self._results[action.microbatch] = made
    elif made is not None:
        self._input_gradients[len(self._input_gradients)] = made


@mutant(
    target="pipeline_parallel.stage_runner.AutogradRunner.backward_input",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_a_backward_uses_the_activations_of_its_own_microbatch"
    ),
)
def pipeline_last_microbatchs_activations(self, microbatch: int, dy):
    """With several microbatches gradients are wrong: each backward uses the last forward's activations."""
    x, edge = self._begun.popitem()[1]
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    return x.grad


@mutant(
    target="pipeline_parallel.stage_runner.AutogradRunner",
    killer="tests.pipeline_parallel.test_mutant_killers.test_the_loss_is_the_mean_over_all_microbatches",
    cause="where a mean is due",
)
class pipeline_loss_not_divided(AutogradRunner):
    """With many microbatches training diverges: gradients are too large by the number of microbatches."""

    def __init__(self, stage: Any, microbatches: int, *args: Any, **options: Any) -> None:
        super().__init__(stage, 1, *args, **options)


@mutant(
    target="pipeline_parallel.executor.Executor._hand_over",
    killer="tests.pipeline_parallel.test_mutant_killers.test_the_loss_is_the_mean_over_all_microbatches",
    cause="only the last one used",
    symptom="The printed loss is noisy and too small, and training is right.",
)
def pipeline_loss_of_the_last_microbatch(self, action, made) -> None:
    """The printed loss is noisy and too small: it has only the last microbatch's part of the mean."""
    message = sent_by(action, self.last_stage)
    if message is not None and made is not None:
        self._ready[message] = made
    elif made is not None and action.kind == FORWARD:
        self._results = {action.microbatch: made}
    elif made is not None:
        self._input_gradients[action.microbatch] = made


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.clip_grad_norm_",
    killer="tests.pipeline_parallel.test_plausible_use.test_the_norm_is_that_of_all_stages",
    cause="counted on each",
    symptom="With tied weights clipping is too strong.",
)
def pipeline_norm_counts_tied_copies(self, max_norm: float) -> Tensor:
    """With tied weights clipping is too strong: the norm counts the embedding on both ranks that have a
    copy.
    """
    return clip_grad_norm_(self.parameters(), max_norm, self.group, device=self.device)


@mutant(
    target="pipeline_parallel.messages.with_messages",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers.test_messages_meet_the_receives_that_are_meant_for_them"
    ),
)
def pipeline_receives_in_order_of_need(table: Table, ahead: int = 1) -> list[list[Step]]:
    """Stages receive the wrong tensors of the right shape: receives are not in the order of the sends."""
    rank_of = placement(table)
    last_stage = max(rank_of)
    programs: list[list[Step]] = []
    for rank, row in enumerate(table):
        steps: list[Step] = []
        for action in row:
            needed, made = received_by(action, last_stage), sent_by(action, last_stage)
            if needed is not None and rank_of[needed.stage] != rank:
                steps.append(Receive(needed, rank_of[needed.stage]))
            steps.append(action)
            if made is not None and rank_of[made.receiver] != rank:
                steps.append(Send(made, rank_of[made.receiver]))
        sends = [step for step in steps if isinstance(step, Send)]
        programs.append(steps + [WaitForSend(*send) for send in sends])
    return programs


@mutant(
    target="pipeline_parallel.stage_runner.AutogradRunner.forward",
    killer="tests.pipeline_parallel.test_mutant_killers.test_recomputation_drops_out_the_same",
)
def pipeline_recomputed_with_other_masks(self, microbatch: int, x, target=None):
    """With recomputation and dropout gradients are wrong: the second forward draws other dropout masks."""
    if self.recompute:
        y = checkpoint(self._compute, x, target, None, use_reentrant=False, preserve_rng_state=False)
    else:
        y = self._compute(x, target, None)
    self._begun[microbatch] = x, get_gradient_edge(y) if y.requires_grad else None
    return y.detach()


@mutant(
    target="pipeline_parallel.failure.SharedFailure.compute_unless_failed",
    killer="tests.pipeline_parallel.test_failure.test_a_smaller_last_batch_is_refused_by_all_ranks",
)
def pipeline_refused_alone(self, action, compute, like=None):
    """A smaller last batch is an error on the first rank only, and the others wait until the timeout."""
    return compute()


@mutant(
    target="pipeline_parallel.stage_gradient.refuse_norms_of_a_stage",
    killer=(
        "tests.pipeline_parallel.test_plausible_use."
        "test_torchs_own_clipping_and_grad_scalers_are_refused_on_all_ranks_and_a_single_norm_is_not"
    ),
    cause="check that must refuse it",
    fails_with="DID NOT RAISE",
)
def pipeline_scaler_asks_one_rank(parameters) -> None:
    """A GradScaler skips a step only on the rank that has found an infinity: the other stages take the
    step.
    """
    pass


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.finish_gradient_sync",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers.test_both_copies_of_a_tied_embedding_get_both_gradients"
    ),
    cause="divided by their number once too often",
)
def pipeline_tied_averaged(self) -> None:
    """A tied embedding learns at half the rate: its two gradients are averaged instead of added."""
    for mine, peer in self._shared():
        others = torch.empty_like(mine.grad)
        arriving, leaving = irecv(others, peer, self.group), isend(mine.grad, peer, self.group)
        arriving.wait()
        leaving.wait()
        mine.grad = (mine.grad + others) / 2


@mutant(
    target="pipeline_parallel.pipeline.Pipeline._make_ties_equal",
    killer="tests.pipeline_parallel.test_mutant_killers.test_tied_copies_are_equal_before_the_first_step",
    cause="not started from rank 0's values",
    symptom="The two copies of a tied weight differ from the first step on.",
)
def pipeline_tied_copies_differ(self) -> None:
    """Tied weights differ from the first step on, because only the first rank has loaded pretrained
    weights.
    """
    pass


@mutant(
    target="pipeline_parallel.tied.NewGradients.take",
    killer="tests.pipeline_parallel.test_tied.test_a_tied_gradient_counts_once_after_two_accumulated_steps",
    cause="counted again",
)
def pipeline_tied_counted_again(self, parameter):
    """With accumulation a tied embedding learns too fast: the other rank's earlier gradient is added
    twice.
    """
    self._versions.pop(parameter, None)
    self._new.pop(parameter, None)
    return None if parameter.grad is None else parameter.grad.clone()


@mutant(
    target="pipeline_parallel.pipeline.Pipeline.finish_gradient_sync",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers.test_both_copies_of_a_tied_embedding_get_both_gradients"
    ),
    symptom="The embedding and the head share a weight, and after some steps they do not.",
)
def pipeline_tied_not_synchronised(self) -> None:
    """The embedding and the head share a weight in the model, but each rank trains its own copy."""
    pass


@mutant(
    target="pipeline_parallel.deferred.DeferredGradients.run",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_a_split_backward_computes_every_weights_gradient_once"
    ),
    cause="is it not computed",
)
@torch.no_grad()
def pipeline_weight_gradient_of_the_last_layer(self) -> None:
    """Only one layer of a stage learns: the loop over the deferred gradients ends too early."""
    self.tensors.clear()
    if self.waiting:
        self.waiting.pop()()
    self.waiting.clear()


@mutant(
    target="pipeline_parallel.deferred._Linear.backward",
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
        _add_to(weight, rows_of_dy.t() @ rows_of_x)
        if bias is not None:
            _add_to(bias, rows_of_dy.sum(0))

    ctx.deferred.add(weights, x, dy)
    return None, dy @ weight, rows_of_dy.t() @ rows_of_x, None if bias is None else rows_of_dy.sum(0)


@mutant(
    target="pipeline_parallel.deferred.DeferredGradients.run",
    killer=(
        "tests.pipeline_parallel.test_mutant_killers."
        "test_when_weight_gradients_are_computed_nothing_they_needed_is_left"
    ),
)
def pipeline_weight_gradient_with_a_graph(self) -> None:
    """Memory grows in every step: weight gradients are computed with a graph, which keeps their inputs."""
    self.tensors.clear()
    while self.waiting:
        self.waiting.pop()()


@mutant(
    target="pipeline_parallel.stage_runner.AutogradRunner.backward_input",
    killer="tests.pipeline_parallel.test_mutant_killers.test_gradients_of_the_microbatches_add_up",
    cause="cleared",
    symptom="With more microbatches the gradients of a batch become smaller.",
)
def pipeline_zeroed_between_microbatches(self, microbatch: int, dy):
    """Only the last microbatch trains the model: each backward clears the gradients of the earlier ones."""
    x, edge = self._begun.pop(microbatch)
    self.stage.zero_grad()
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    return x.grad
