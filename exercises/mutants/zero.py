"""Wrong implementations of ZeRO."""

import torch
from torch import Tensor, nn

from comm.collectives import reduce_scatter
from exercises.mutants import mutant
from zero.train_zero1 import Bucket


@mutant(
    target="zero.train_zero1.ZeroOptimizer.step",
    killer="tests.zero.test_equality.test_after_a_step_all_ranks_compute_with_the_new_parameters",
    cause="new parameters gathered",
)
def zero1_not_gathered(self, closure=None) -> None:
    """In stage 1 replicas drift apart: each rank sees the updates of its own shard only."""
    self._guard.before_step()
    self.inner.step()


@mutant(
    target="zero.train_zero1.ZeroOptimizer._launch",
    killer="tests.zero.test_equality.test_a_gradient_is_the_mean_over_ranks_not_their_sum",
    cause="sum over ranks that should be a mean",
)
def zero1_summed(self, bucket: Bucket) -> None:
    """In stage 1 with SGD the learning rate seems to grow with the number of ranks: shards hold sums."""
    mine = bucket.gradients[bucket.layout.mine]
    work = reduce_scatter(
        mine, bucket.gradients, op="sum", group=self.group, async_op=True, pattern=self.pattern
    )
    self._in_flight.append((bucket, work))


@mutant(
    target="zero.train_zero1.ZeroOptimizer._move_in",
    killer="tests.zero.test_equality.test_an_unused_parameter_gets_zeros_also_where_only_some_ranks_use_it",
)
def zero1_unused_keep_the_last_steps_gradient(self, parameter: Tensor, bucket: Bucket) -> None:
    """A layer that few examples use is trained too often: a rank that does not use it sends old numbers."""
    view = bucket.gradient_views[parameter]
    if parameter.grad is not None and parameter.grad is not view:
        view.copy_(parameter.grad)
    parameter.grad = None if self._guard.is_synchronising else view


@mutant(
    target="zero.train_zero1.ZeroOptimizer._move_in",
    killer="tests.zero.test_equality.test_the_gradients_of_all_microbatches_add_up_in_the_shards",
    cause="only the last one used",
)
def zero1_last_microbatch_only(self, parameter: Tensor, bucket: Bucket) -> None:
    """In stage 1 accumulation uses the last microbatch only: its gradients replace the earlier ones."""
    view = bucket.gradient_views[parameter]
    if parameter.grad is None:
        view.zero_()
    else:
        view.copy_(parameter.grad)
    parameter.grad = None


@mutant(
    target="zero.train_zero1.ZeroOptimizer._on_gradient",
    killer="tests.zero.test_equality.test_the_backward_of_one_rank_may_run_in_another_order",
    symptom="When ranks compute their gradients in different orders, layers learn from wrong gradients.",
)
def zero_order_of_each_rank(self, parameter: Tensor) -> None:
    """Layers get each other's gradients when ranks compute their gradients in different orders."""
    if self._guard.gradient_of(parameter) is None:
        return
    bucket = self._bucket_of[parameter]
    self._move_in(parameter, bucket)
    if self._guard.is_synchronising:
        bucket.missing.discard(parameter)
        if not bucket.missing:
            self._to_launch.remove(bucket)
            self._launch(bucket)


@mutant(
    target="zero.train_zero2.ZeroGradientOptimizer._launch",
    killer="tests.zero.test_costs.test_at_most_three_buckets_of_gradients_are_alive",
    cause="kept",
)
def zero2_buckets_add_up(self, bucket: Bucket) -> None:
    """On a slow link stage 2 needs as much memory as stage 1: buckets fill faster than they are sent."""
    mine = bucket.gradients[bucket.layout.mine]
    work = reduce_scatter(
        mine, bucket.gradients, op="mean", group=self.group, async_op=True, pattern=self.pattern
    )
    self._in_flight.append((bucket, work))


@mutant(
    target="zero.train_zero2.ZeroGradientOptimizer._wait_for_oldest",
    killer="tests.zero.test_costs.test_between_steps_a_rank_holds_what_the_formula_says_and_nothing_else",
    cause="kept",
)
def zero2_keeps_the_full_gradient(self) -> None:
    """Stage 2 needs as much memory as stage 1: each shard is a view, which keeps its full bucket in
    memory.
    """
    bucket, work = self._in_flight.popleft()
    work.wait()
    bucket.layout.add_gradient(bucket.shards, bucket.gradients[bucket.layout.mine])


@mutant(
    target="zero.train_zero2.ZeroGradientOptimizer._wait_for_oldest",
    killer="tests.zero.test_equality.test_the_gradients_of_all_microbatches_add_up_in_the_shards",
    cause="only the last one used",
)
def zero2_last_microbatch_only(self) -> None:
    """In stage 2 accumulation uses the last microbatch only: its gradients replace the earlier ones."""
    bucket, work = self._in_flight.popleft()
    work.wait()
    for shard in bucket.shards:
        shard.tensor.grad = None
    bucket.layout.add_gradient(bucket.shards, bucket.gradients[bucket.layout.mine].clone())
    bucket.gradients.untyped_storage().resize_(0)


@mutant(
    target="zero.train_zero3.FullyShardedDataParallel._before_backward",
    killer="tests.zero.test_equality.test_the_next_block_is_gathered_while_one_computes",
)
def zero3_prefetches_the_wrong_block(self, i: int, _: Tensor) -> None:
    """Results are right but each backward waits: the block that is prefetched has been used already."""
    self._has_backward, done = True, []
    if i > 0 and self._current is not self.blocks[i]:
        done, self._current = self._current, self.blocks[i]
    for unit in done:
        unit.free()
    for unit in self.blocks[i]:
        unit.gather()
    for unit in self.blocks[i + 1] if i + 1 < len(self.blocks) else []:
        unit.start_gather()
    self._reduce(done)


@mutant(
    target="zero.train_zero3.Unit.free",
    killer="tests.zero.test_equality.test_after_a_step_all_ranks_compute_with_the_new_parameters",
)
def zero3_blocks_never_freed(self) -> None:
    """The loss hardly falls: gathered blocks are never freed, so each step computes with the first
    weights.
    """
    self.gather()  # ends a gather that has begun


@mutant(
    target="zero.train_zero3.FullyShardedDataParallel.finish_gradient_sync",
    killer="tests.zero.test_equality.test_the_next_block_is_gathered_while_one_computes",
)
def zero3_last_block_never_freed(self) -> None:
    """Between steps a rank has more than its shards: what the backward ends with stays in memory."""
    for unit in self.blocks[0]:
        unit.free()
    self._reduce(self._current)
    self._reduce(self.blocks[0])
    self._current = []
    while self._in_flight:
        self._in_flight.popleft().wait_for_gradients()
    self._expects_backward = self._has_backward = False


@mutant(
    target="zero.train_zero3.FullyShardedDataParallel.finish_gradient_sync",
    killer="tests.zero.test_equality.test_a_gradient_is_the_mean_over_ranks_not_their_sum",
)
def zero3_last_block_not_sent(self) -> None:
    """The first block learns from the examples of the step before: its gradients miss the end of a step."""
    for unit in self.units:
        unit.free()
    self._reduce(self.blocks[0])
    self._current = []
    while self._in_flight:
        self._in_flight.popleft().wait_for_gradients()
    self._expects_backward = self._has_backward = False


@mutant(
    target="zero.train_zero3.Unit.wait_for_gradients",
    killer="tests.zero.test_equality.test_the_gradients_of_all_microbatches_add_up_in_the_shards",
    cause="only the last one used",
)
def zero3_last_microbatch_only(self) -> None:
    """In stage 3 accumulation uses the last microbatch only: its gradients replace the earlier ones."""
    mine, work = self._reducing
    del self._reducing
    work.wait()
    for shard in self.shards:
        shard.tensor.grad = None
    self.layout.add_gradient(self.shards, mine.to(self.shard.dtype, copy=True))


@mutant(
    target="zero.train_zero3.Unit.reduce_scatter",
    killer="tests.zero.test_equality.test_a_gradient_is_the_mean_over_ranks_not_their_sum",
    cause="sum over ranks that should be a mean",
    symptom="In stage 3 clipping acts in most steps, and SGD steps are too long.",
)
def zero3_summed(self) -> None:
    """In stage 3 gradients are n times too large: clipping acts in most steps, and SGD steps are too long."""
    gradients = self.full.new_zeros(self.full.shape)
    for parameter, view in zip(self.layout.parameters, self.layout.views(gradients), strict=True):
        if parameter.grad is not None:
            view.copy_(parameter.grad)
            parameter.grad = None
    mine = gradients[self.layout.mine]
    work = reduce_scatter(mine, gradients, "sum", self.group, async_op=True, pattern=self.pattern)
    self._reducing = mine, work


@mutant(
    target="zero.train_zero3.Unit.reduce_scatter",
    killer="tests.zero.test_equality.test_the_gradients_of_all_microbatches_add_up_in_the_shards",
)
def zero3_gradients_sent_again(self) -> None:
    """In stage 3 the first microbatches weigh most: a gradient that was sent is not cleared."""
    gradients = self.full.new_zeros(self.full.shape)
    for parameter, view in zip(self.layout.parameters, self.layout.views(gradients), strict=True):
        if parameter.grad is not None:
            view.copy_(parameter.grad)
    mine = gradients[self.layout.mine]
    work = reduce_scatter(mine, gradients, "mean", self.group, async_op=True, pattern=self.pattern)
    self._reducing = mine, work


@mutant(
    target="zero.train_zero3.divide",
    killer="tests.zero.test_equality.test_a_layer_shared_by_blocks_is_gathered_in_each_of_them",
)
def zero3_shared_goes_with_the_first_block(
    module: nn.Module, blocks: list[nn.Module]
) -> list[list[nn.Parameter]]:
    """A model with tied layers gets nan: the shared weight is freed with the first block."""
    taken: set[nn.Parameter] = set()
    own: list[list[nn.Parameter]] = []
    for block in blocks:
        own.append([parameter for parameter in block.parameters() if parameter not in taken])
        taken.update(own[-1])
    return [[parameter for parameter in module.parameters() if parameter not in taken], *own]


@mutant(
    target="training.clipping.clip_grad_norm_",
    killer="tests.zero.test_equality.test_gradients_are_clipped_by_the_norm_over_all_shards",
    cause="one rank's part",
)
def zero_clipped_by_the_local_norm(shards: list[nn.Parameter], max_norm: float, group, pattern) -> Tensor:
    """Clipped gradients are too long and change direction: each rank clips by the norm of its own shard."""
    gradients = [shard.grad for shard in shards if shard.grad is not None]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@mutant(
    target="zero.shards.FlatLayout.split",
    killer="tests.zero.test_equality.test_every_number_of_every_parameter_is_in_one_ranks_shard",
    symptom="The last number of each shard never changes, and the losses look normal.",
)
def zero_shard_off_by_one(self, shard: Tensor) -> list[tuple[int, Tensor]]:
    """The last number of each shard never changes, because no rank owns it; the losses look normal."""
    parts, offset, stop = [], 0, self.mine.stop - 1
    for size in self.sizes:
        begin, end = max(self.mine.start, offset), min(stop, offset + size)
        if begin < end:
            parts.append((begin - offset, shard[begin - self.mine.start : end - self.mine.start]))
        else:
            parts.append((0, shard[:0]))
        offset += size
    return parts
