"""Wrong implementations of ZeRO."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import reduce_scatter
from data_parallel.flat import ParameterBucket
from exercises.mutants import mutant
from zero.blocks import blocks_of
from zero.train_zero3 import FullyShardedDataParallel


@mutant(
    target="zero.train_zero1.ZeroOptimizer.finish_gradient_sync",
    killer=(
        "tests.zero.test_zero_mutant_killers."
        "test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all"
    ),
    cause="in different orders",
    fails_with="The ranks do not fit together",
)
def zero1_agrees_before_it_sends(self) -> None:
    """ZeRO stops if one rank does not use a layer: flags of used layers pair with a bucket of another
    rank.
    """
    if self._steps.is_synced:
        return
    used = self._agree_on_used()
    self._complete_buckets()
    for bucket in self.buckets:
        self._give_gradients(bucket, self._gradients[bucket][bucket.flat.mine], used)


@mutant(
    target="zero.train_zero1.ZeroOptimizer.step",
    killer="tests.zero.test_zero_mutant_killers.test_after_a_step_all_ranks_compute_with_the_new_parameters",
    cause="new parameters gathered",
)
def zero1_not_gathered(self, closure=None):
    """In stage 1 replicas drift apart: each rank sees the updates of its own shard only."""
    result = None if closure is None else closure()
    if not self._steps.is_synced:
        self.finish_gradient_sync()
    self._before_step()
    self.inner.step()
    return result


@mutant(
    target="zero.train_zero1.ZeroOptimizer._reduce_scatter",
    killer="tests.zero.test_zero_mutant_killers.test_a_gradient_is_the_mean_over_ranks_not_their_sum",
    cause="sum over ranks that should be a mean",
)
def zero1_summed(self, bucket: ParameterBucket) -> None:
    """In stage 1 with SGD the learning rate seems to grow with the number of ranks: shards hold sums."""
    full = self._gradients[bucket]
    shard = full[bucket.flat.mine]
    handle = reduce_scatter(shard, full, op="sum", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append(handle)


@mutant(
    target="zero.train_zero1.ZeroOptimizer.finish_gradient_sync",
    killer=(
        "tests.zero.test_zero_mutant_killers.test_weight_decay_does_not_change_parameters_that_no_rank_used"
    ),
)
def zero1_unused_get_zeros(self) -> None:
    """In stage 1 AdamW's weight decay shrinks layers that no rank uses: zeros count as their gradients."""
    self._complete_buckets()
    self._agree_on_used()
    every = {piece.parameter for piece in self.pieces}
    for bucket in self.buckets:
        self._give_gradients(bucket, self._gradients[bucket][bucket.flat.mine], every)


@mutant(
    target="zero.train_zero2.ZeroGradientOptimizer._reduce_scatter",
    killer="tests.zero.test_zero_mutant_killers.test_at_most_three_buckets_of_gradients_are_alive",
    cause="kept",
)
def zero2_buckets_add_up(self, bucket: ParameterBucket) -> None:
    """On a slow link stage 2 needs as much memory as stage 1: buckets fill faster than they are sent."""
    full = self._filling.pop(bucket)
    shard = full.new_empty(bucket.flat.shard_numel)
    handle = reduce_scatter(shard, full, op="mean", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append((bucket, full, shard, handle))


@mutant(
    target="zero.train_zero2.ZeroGradientOptimizer._reduce_scatter",
    killer="tests.zero.test_zero_mutant_killers.test_stage_2_keeps_only_its_shard_of_the_gradient",
    cause="kept",
)
def zero2_keeps_the_full_gradient(self, bucket: ParameterBucket) -> None:
    """Stage 2 needs as much memory as stage 1: each shard is a view, which keeps its full bucket in
    memory.
    """
    while len(self._in_flight) >= 2:
        self._wait_for_oldest()
    full = self._filling.pop(bucket)
    shard = full[bucket.flat.mine]
    handle = reduce_scatter(shard, full, op="mean", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append((bucket, full, shard, handle))


@mutant(
    target="zero.train_zero2.ZeroGradientOptimizer._wait_for_oldest",
    killer="tests.zero.test_zero_mutant_killers.test_the_gradients_of_all_microbatches_add_up_in_the_shards",
    cause="only the last one used",
)
def zero2_last_microbatch_only(self) -> None:
    """In stage 2 accumulation uses the last microbatch only: its gradients replace the earlier ones."""
    bucket, _, shard, handle = self._in_flight.popleft()
    handle.wait()
    self._shards[bucket] = shard


@mutant(
    target="zero.train_zero2.ZeroGradientOptimizer.step",
    killer="tests.zero.test_zero_mutant_killers.test_after_a_step_all_ranks_compute_with_the_new_parameters",
    cause="new parameters gathered",
)
def zero2_not_gathered(self, closure=None):
    """In stage 2 replicas drift apart: each rank sees the updates of its own shard only."""
    result = None if closure is None else closure()
    if not self._steps.is_synced:
        self.finish_gradient_sync()
    self._before_step()
    self.inner.step()
    return result


@mutant(
    target="zero.train_zero2.ZeroGradientOptimizer._reduce_scatter",
    killer="tests.zero.test_zero_mutant_killers.test_a_gradient_is_the_mean_over_ranks_not_their_sum",
    cause="sum over ranks that should be a mean",
    symptom="In stage 2 clipping acts in most steps, and SGD steps are too long.",
)
def zero2_summed(self, bucket: ParameterBucket) -> None:
    """In stage 2 gradients are n times too large: clipping acts in most steps, and SGD steps are too long."""
    full = self._filling.pop(bucket)
    shard = full.new_empty(bucket.flat.shard_numel)
    handle = reduce_scatter(shard, full, op="sum", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append((bucket, full, shard, handle))


@mutant(
    target="zero.train_zero2.ZeroGradientOptimizer.finish_gradient_sync",
    killer=(
        "tests.zero.test_zero_mutant_killers.test_weight_decay_does_not_change_parameters_that_no_rank_used"
    ),
)
def zero2_unused_get_zeros(self) -> None:
    """In stage 2 AdamW's weight decay shrinks layers that no rank uses: zeros count as their gradients."""
    self._complete_buckets()
    self._agree_on_used()
    every = {piece.parameter for piece in self.pieces}
    for bucket in self.buckets:
        self._give_gradients(bucket, self._shards[bucket], every)


@mutant(
    target="zero.freed.Note.view",
    killer="tests.zero.test_zero3_refusals.test_a_backward_after_the_optimizers_step_is_refused",
    cause="check that must refuse it",
    fails_with="DID NOT RAISE",
)
def zero3_backward_with_new_parameters(self) -> torch.Tensor:
    """Gradients are wrong without an error when the optimizer steps between a forward and its backward."""
    self.unit.gather()
    nothing = torch.empty(0, dtype=self.dtype)
    return nothing.set_(self.unit.full.untyped_storage(), self.offset, self.shape, self.stride)


@mutant(
    target="zero.blocks.ShardedBlock.free",
    killer="tests.zero.test_zero_mutant_killers.test_after_a_step_all_ranks_compute_with_the_new_parameters",
    cause="old copies freed",
)
def zero3_blocks_never_freed(self) -> None:
    """The loss hardly falls: gathered blocks are never freed, so each step computes with the first
    weights.
    """
    for unit in self.units:
        unit.gather()  # ends a gather that has begun


@mutant(
    target="zero.any_loop.AnyLoop._give_up_backward",
    killer="tests.zero.test_zero3_exceptions.test_after_an_exception_in_any_pass_the_next_step_is_right",
)
def zero3_broken_gradients_kept(self) -> None:
    """After a caught exception the next step's gradients are too large: the failed step's are added to
    them.
    """
    if self._is_in_backward:
        self._end_backward()


@mutant(
    target="zero.gradient_shard.GradientShard.keep",
    killer="tests.zero.test_zero_mutant_killers.test_the_gradients_of_all_microbatches_add_up_in_the_shards",
    cause="only the last one used",
)
def zero3_last_microbatch_only(self, arrived) -> None:
    """In stage 3 accumulation uses the last microbatch only: its gradients replace the earlier ones."""
    self.full, self._views = None, []
    self.shard = arrived.to(self._dtype)


@mutant(
    target="zero.any_loop.AnyLoop._send_late",
    killer="tests.zero.test_zero3_loops.test_forwards_and_backwards_may_come_in_any_number_and_order",
    cause="never written",
)
def zero3_late_gradients_lost(self) -> None:
    """A gradient penalty trains wrongly: gradients that come after a block's backward are lost."""
    self._late.clear()


@mutant(
    target="zero.train_zero3.FullyShardedDataParallel._before_backward",
    killer="tests.zero.test_zero_mutant_killers.test_a_block_is_gathered_during_its_forward_and_its_backward",
)
def zero3_not_gathered_in_the_backward(self, turn) -> None:
    """Results are right but each backward waits: a block is gathered unit by unit, when a unit is needed."""
    self._begin_backward()
    turn.has_begun, at = True, self._turns.index(turn)
    for later in self._turns[at + 1 :]:
        later.block.finish(self._reductions)


@mutant(
    target="zero.wrapped.refuse_penalties",
    killer="tests.zero.test_zero3_refusals.test_a_penalty_on_the_shards_is_refused",
    cause="check that must refuse it",
    fails_with="DID NOT RAISE",
)
def zero3_penalty_lost(names, units) -> None:
    """A penalty on the parameters has no effect: its gradient goes to the shards and is overwritten there."""
    pass


@mutant(
    target="zero.train_zero3.FullyShardedDataParallel._before_backward",
    killer="tests.zero.test_zero_mutant_killers.test_the_next_block_is_gathered_while_one_computes",
)
def zero3_prefetches_the_wrong_block(self, turn) -> None:
    """Results are right but each backward waits: the block that is prefetched has been used already."""
    self._begin_backward()
    turn.block.gather()
    turn.has_begun, at = True, self._turns.index(turn)
    for later in self._turns[at + 1 :]:
        later.block.finish(self._reductions)
    if at + 1 < len(self._turns):
        self._turns[at + 1].block.start_gather()


@mutant(
    target="zero.wrapped.Wrapped.refuse_changes",
    killer="tests.zero.test_zero3_refusals.test_a_module_that_was_changed_after_wrapping_is_refused",
    cause="check that must refuse it",
    fails_with="DID NOT RAISE",
)
def zero3_replaced_not_noticed(self) -> None:
    """A layer that was replaced after wrapping is not trained in sync, and its replicas drift apart."""
    pass


@mutant(
    target="zero.blocks.ShardedBlock.free",
    killer="tests.zero.test_zero_mutant_killers.test_after_a_step_all_ranks_compute_with_the_new_parameters",
    cause="old copies freed",
)
def zero3_root_never_freed(self) -> None:
    """Embeddings and head do not learn: their gathered copy is never freed, so updates do not reach it."""
    for unit in self.units:
        if unit.name == "root":
            unit.gather()
        else:
            unit.free()


class _Rest:
    """Wraps a block and leaves out the parameters that an earlier block has, too."""

    def __init__(self, block: nn.Module, taken: set[nn.Parameter]) -> None:
        self._block = block
        self._own = [parameter for parameter in block.parameters() if parameter not in taken]
        taken.update(self._own)

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self._own)

    def __getattr__(self, name: str):
        return getattr(self._block, name)


@mutant(
    target="zero.train_zero3.FullyShardedDataParallel",
    killer="tests.zero.test_zero_mutant_killers.test_a_layer_shared_by_blocks_is_gathered_in_each_of_them",
)
class zero3_shared_goes_with_the_first_block(FullyShardedDataParallel):
    """A model with tied layers crashes in its forward: the shared weight is freed with the first block."""

    def __init__(self, module: nn.Module, *args, **options) -> None:
        taken: set[nn.Parameter] = set()
        super().__init__(
            module, *args, **options, blocks=[_Rest(block, taken) for block in blocks_of(module)]
        )


@mutant(
    target="zero.train_zero3.Unit.reduce_scatter",
    killer="tests.zero.test_zero_mutant_killers.test_a_gradient_is_the_mean_over_ranks_not_their_sum",
    cause="sum over ranks that should be a mean",
    symptom="In stage 3 clipping acts in most steps, and SGD steps are too long.",
)
def zero3_summed(self) -> None:
    """In stage 3 gradients are n times too large: clipping acts in most steps, and SGD steps are too long."""
    full = self.gradients.full
    shard = full.new_empty(self.flat.shard_numel)
    handle = reduce_scatter(shard, full, op="sum", group=self.group, async_op=True, pattern=self.pattern)
    self._reducing = shard, handle


@mutant(
    target="zero.any_loop.AnyLoop._agree_on_gradients",
    killer=(
        "tests.zero.test_zero_mutant_killers.test_weight_decay_does_not_change_parameters_that_no_rank_used"
    ),
)
def zero3_unused_get_zeros(self) -> None:
    """In stage 3 AdamW's weight decay shrinks layers that no rank uses: zeros count as their gradients."""
    self._order_so_far = 0
    self._is_synced = True


@mutant(
    target="zero.unit.ShardedUnit.adopt_gradients",
    killer="tests.zero.test_zero3_loops.test_a_gan_learns_as_in_one_process",
)
def zero3_zero_grad_unnoticed(self) -> list:
    """A GAN does not learn: the discriminator keeps gradients that zero_grad() should have cleared."""
    return []


@mutant(
    target="zero.shard_guard.ShardGuard.placeholder",
    killer=(
        "tests.zero.test_sharded_clipping.test_torchs_own_clipping_is_refused_and_the_optimizers_own_is_right"
    ),
    cause="check that must refuse it",
    fails_with="DID NOT RAISE",
)
def zero_clipped_by_torch(self, parameter: Tensor) -> Tensor | None:
    """torch's clip_grad_norm_ has no effect in stage 2, and a different effect on each rank in stage 1."""
    return parameter.grad


@mutant(
    target="zero.sharded_optimizer.ShardedOptimizer._has_arrived",
    killer=(
        "tests.zero.test_sharded_loops."
        "test_a_dropped_backward_through_some_layers_does_not_change_later_microbatches"
    ),
    symptom="In a GAN the gradients of a microbatch are sometimes wrong.",
)
def zero_dropped_gradients_come_back(self, parameter: Tensor) -> bool:
    """In a GAN gradients that were dropped are averaged together with those of the next microbatch."""
    if not self._guard.has_gradient(parameter):
        return False
    self._steps.before_gradient(is_second=parameter in self._arrivals)
    if self._steps.drops_a_backward():
        self._drop_gradients()
        self._used.clear()
    self._used.add(parameter)
    return True


@mutant(
    target="zero.gradient_arrivals.GradientArrivals.add",
    killer="tests.zero.test_zero_mutant_killers.test_the_backward_of_one_rank_may_run_in_another_order",
    symptom="When ranks compute their gradients in different orders, layers learn from wrong gradients.",
)
def zero_order_of_each_rank(self, parameter: Tensor) -> None:
    """Layers get each other's gradients when ranks compute their gradients in different orders."""
    number = self._number[parameter]
    self._missing[number].discard(parameter)
    self._arrived.add(parameter)
    if not self._missing[number]:
        self._launch(self._buckets[number])


@mutant(
    target="zero.replaced.Replacements.find",
    killer=(
        "tests.zero.test_sharded_changes.test_replaced_parameters_are_refused_until_the_optimizer_has_them"
    ),
    cause="check that must refuse it",
    fails_with="DID NOT RAISE",
)
def zero_replaced_not_noticed(self) -> None:
    """A new head does not learn: it was put into the model after the optimizer was made."""
    return None


@mutant(
    target="zero.sharded_optimizer.ShardedOptimizer.load_state_dict",
    killer=(
        "tests.zero.test_sharded_optimizer."
        "test_the_optimizer_state_of_another_rank_is_refused_and_a_ranks_own_is_loaded"
    ),
    cause="check that must refuse it",
    fails_with="DID NOT RAISE",
)
def zero_state_of_rank_0(self, state_dict: dict[str, Any]) -> None:
    """After a resume the loss is worse for a while: all ranks have loaded the momentum of rank 0."""
    self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
    self.param_groups, self.state = self.inner.param_groups, self.inner.state
