"""Wrong implementations of data parallelism."""

import copy
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from comm.collectives import Group, all_reduce
from data_parallel.guard import replace_hook
from data_parallel.sampler import DistributedSampler
from data_parallel.train_bucket_overlap import Bucket, BucketDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from exercises.mutants import mutant


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel._wait_for_all",
    killer="tests.data_parallel.test_loops.test_gradients_are_not_used_before_a_slow_link_has_brought_them",
    cause="the average is not what is used",
    symptom="On this machine gradients are right in each run. On a slow network they are not averaged.",
)
def bucket_barrier_hides_a_race(self) -> None:
    """Replicas drift apart on a slow network: a barrier stands for the waits, and it waits for no
    reduction.
    """
    # All ranks have started all reductions when the barrier ends. On a fast link these have then ended, too.
    dist.barrier(self.group)
    for bucket in self.buckets:
        bucket.missing = set(bucket.views)
    self._to_launch, self._in_flight = deque(self.buckets), []


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel",
    killer="tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="cleared",
)
class bucket_cleared_for_the_next_step(BucketDataParallel):
    """The loss does not fall: buckets are set to zero after the reduction, and with them the gradients."""

    def finish_gradient_sync(self) -> None:
        super().finish_gradient_sync()
        for bucket in self.buckets:
            bucket.flat.zero_()


@mutant(
    target="data_parallel.wire_format.to_wire",
    killer=(
        "tests.data_parallel.test_bucket_overlap."
        "test_a_mean_in_fp16_buckets_does_not_overflow_even_if_the_sum_would"
    ),
    cause="divided by their number once too often",
)
def bucket_divided_twice(numbers: Tensor, dtype: torch.dtype, ranks: int) -> tuple[Tensor, str]:
    """With compressed buckets training is slow: gradients are divided by the number of ranks twice."""
    return (numbers / ranks).to(dtype), "mean"


@mutant(
    target="data_parallel.wire_format.real_numbers",
    killer=(
        "tests.data_parallel.test_dtypes."
        "test_complex_gradients_keep_their_imaginary_parts_and_are_clipped_as_in_one_process"
    ),
    symptom="With compressed buckets complex weights become real.",
)
def bucket_drops_imaginary_parts(flat: Tensor) -> Tensor:
    """With compressed buckets complex gradients lose their imaginary part, so complex weights become real."""
    return flat


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel",
    killer=(
        "tests.data_parallel.test_equivalence."
        "test_the_ranks_that_use_a_parameter_may_change_from_step_to_step"
    ),
    cause="one of an earlier step kept",
    symptom="A parameter that is not used in a step moves all the same.",
)
class bucket_keeps_the_last_steps_gradient(BucketDataParallel):
    """A parameter that is not used in a step moves all the same, by its gradient of an earlier step."""

    def finish_gradient_sync(self) -> None:
        for parameter, bucket in self._bucket_of.items():
            if parameter.grad is None:
                parameter.grad = bucket.views[parameter]  # with what an earlier step left in it
        super().finish_gradient_sync()


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel._on_gradient",
    killer="tests.data_parallel.test_equivalence.test_hooks_on_one_rank_may_fire_in_another_order",
    cause="agree on one order",
    symptom="When one rank computes gradients in another order, training hangs, or its buckets are wrong.",
    fails_with="The ranks do not fit together",
)
def bucket_launched_as_soon_as_complete(self, parameter: Tensor) -> None:
    """When one rank computes gradients in another order, different buckets are averaged, or all ranks
    hang.
    """
    bucket = self._bucket_of[parameter]
    bucket.move_in(parameter)
    if self._guard.has_gradient(parameter) and self._guard.is_synchronising:
        self.order.see(parameter)
        bucket.missing.remove(parameter)
        if not bucket.missing:
            self._to_launch.remove(bucket)
            self._launch(bucket)


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel._drop_unfinished",
    killer=(
        "tests.data_parallel.test_loops."
        "test_a_dropped_backward_that_did_not_reach_all_layers_is_refused_on_all_ranks"
    ),
    cause="check that must refuse it",
    symptom="After a backward that was dropped, gradients are wrong, or training hangs.",
    fails_with="DID NOT RAISE",
)
def bucket_launched_in_two_backwards(self, parameter: Tensor) -> None:
    """After a backward that was dropped, ranks launch different numbers of buckets and mix them up."""
    is_kept = parameter.grad is self._bucket_of[parameter].views[parameter]
    self._guard.refuse_unless_dropped(parameter, is_kept)
    self._wait_for_all()
    self.order.forget()


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel",
    killer="tests.data_parallel.test_equivalence.test_ranks_start_from_rank_0s_parameters_and_buffers",
    cause="broadcast missing",
)
class bucket_missing_broadcast(BucketDataParallel):
    """Replicas never agree: their gradients are averaged, but their initial weights are different."""

    def __init__(self, module: nn.Module, *args, **options) -> None:
        own = copy.deepcopy(module.state_dict())
        super().__init__(module, *args, **options)
        module.load_state_dict(own)  # undoes the broadcast


@mutant(
    target="data_parallel.wire_format.RoundedAllReduce.wait",
    killer=(
        "tests.data_parallel.test_bucket_overlap.test_compressed_gradients_are_close_and_take_half_the_bytes"
    ),
    cause="the average is not what is used",
)
def bucket_not_copied_back(self) -> None:
    """Replicas drift apart: compressed gradients are averaged, but each rank steps with its own gradients."""
    self._work.wait()


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel._wait_for_all",
    killer="tests.data_parallel.test_loops.test_gradients_are_not_used_before_a_slow_link_has_brought_them",
    cause="the average is not what is used",
)
def bucket_not_waited_for(self) -> None:
    """Replicas drift apart, and only on a slow network: a step begins while its last buckets are still
    sent.
    """
    for bucket in self.buckets:
        bucket.missing = set(bucket.views)
    self._to_launch, self._in_flight = deque(self.buckets), []


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel.set_extra_state",
    killer="tests.data_parallel.test_bucket_overlap.test_a_resumed_run_equals_an_uninterrupted_run",
)
def bucket_order_not_saved(self, state: dict) -> None:
    """A run that is resumed from a checkpoint differs in the last bits from a run without an interruption."""
    pass


@mutant(
    target="data_parallel.bucket_order.BucketOrder.adopt_observed",
    killer="tests.data_parallel.test_equivalence.test_hooks_on_one_rank_may_fire_in_another_order",
    symptom="When one rank computes gradients in another order, parameters learn from wrong gradients.",
)
def bucket_order_of_each_rank(self, group: Group) -> bool:
    """When one rank computes gradients in another order, parameters get the gradients of other parameters."""
    if self._seen is None:
        return False
    before, self._numbers, self._seen = self._numbers, self._observed(self._seen), None
    return self._numbers != before


@mutant(
    target="data_parallel.wire_format.to_wire",
    killer=(
        "tests.data_parallel.test_bucket_overlap."
        "test_a_mean_in_fp16_buckets_does_not_overflow_even_if_the_sum_would"
    ),
    cause="overflows to inf",
)
def bucket_overflows_in_fp16(numbers: Tensor, dtype: torch.dtype, ranks: int) -> tuple[Tensor, str]:
    """With fp16 buckets the loss becomes nan: gradients are rounded to fp16 before they are divided."""
    return numbers.to(dtype), "mean"


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel._drop_unfinished",
    killer=(
        "tests.data_parallel.test_loops."
        "test_a_backward_does_not_write_into_buckets_of_dropped_gradients_while_these_travel"
    ),
)
def bucket_overwritten_while_it_travels(self, parameter: Tensor) -> None:
    """In a GAN gradients are sometimes wrong: the next backward writes into buckets that are still being
    sent.
    """
    for bucket in self.buckets:
        bucket.missing = set(bucket.views)
    self._to_launch, self._in_flight = deque(self.buckets), []


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel._launch",
    killer="tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="sum over ranks that should be a mean",
    symptom="With SGD, twice as many ranks double the learning rate, and with Adam the loss looks normal.",
)
def bucket_summed(self, bucket: Bucket) -> None:
    """Buckets hold the sum over ranks: with SGD, twice as many ranks double the learning rate."""
    bucket.flags.fill_(1)
    work = all_reduce(bucket.flat, op="sum", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append(work)


@mutant(
    target="data_parallel.train_bucket_overlap.Bucket.move_in",
    killer="tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="the average is not what is used",
)
def bucket_without_views(self, parameter: Tensor) -> None:
    """Replicas drift apart: the optimizer uses each rank's own gradients, which are not views of the
    buckets.
    """
    self.views[parameter].copy_(parameter.grad)


@mutant(
    target="data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync",
    killer="tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="sum over ranks that should be a mean",
    symptom="With SGD training diverges on many ranks, and with Adam the loss looks normal.",
)
def gradient_summed(self) -> None:
    """Gradients are summed, not averaged: with SGD training diverges on many ranks, and Adam hides the
    error.
    """
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad, op="sum", group=self.group, pattern=self.pattern)


@mutant(
    target="data_parallel.guard.ReplicaGuard.has_gradient",
    killer=(
        "tests.data_parallel.test_late_gradients."
        "test_weight_gradients_computed_after_the_backward_are_in_the_mean"
    ),
    cause=("not averaged over the ranks", "look at what each rank puts in, before the ranks communicate"),
    symptom="With zero bubble schedules the gradients are not the mean over all microbatches.",
    fails_with=("AssertionError", "Another backward began before finish_gradient_sync()"),
)
def guard_deferred_taken_for_complete(self, parameter: Tensor) -> bool:
    """With zero bubble schedules the mean lacks the weight gradients of all microbatches but the first."""
    return parameter.grad is not None


@mutant(
    target="data_parallel.guard.ReplicaGuard.before_step",
    killer="tests.data_parallel.test_wrapping.test_a_step_without_finish_gradient_sync_is_refused",
    cause="check that must refuse it",
    symptom=(
        "A loop that forgets finish_gradient_sync() trains without an error, and the replicas drift apart."
    ),
    fails_with="DID NOT RAISE",
)
def guard_forgotten_sync_not_noticed(self, optimizer: Optimizer) -> None:
    """A loop that forgets finish_gradient_sync() trains without an error, and the replicas drift apart."""
    pass


@mutant(
    target="data_parallel.ordered_launcher.OrderedLauncher.ready",
    killer="tests.data_parallel.test_equivalence.test_hooks_on_one_rank_may_fire_in_another_order",
    symptom="When one rank computes gradients in another order, training hangs, or the gradients are wrong.",
)
def launched_as_soon_as_ready(self, i: int) -> None:
    """If one rank computes gradients in another order, ranks average different parameters' gradients, or
    hang.
    """
    self._ready.add(i)
    self._launch(i)


@mutant(
    target="data_parallel.train_naive.NaiveDataParallel.__init__",
    killer="tests.data_parallel.test_equivalence.test_ranks_start_from_rank_0s_parameters_and_buffers",
    cause="broadcast missing",
    symptom="The loss falls on each rank, but the replicas never agree.",
)
def missing_broadcast(self, module: nn.Module, group: Group = None, pattern: str | None = None) -> None:
    """Ranks start from different random weights: the loss falls on each rank, but replicas never agree."""
    nn.Module.__init__(self)
    self.module, self.group, self.pattern = module, group, pattern


@mutant(
    target="data_parallel.train_overlap.OverlapDataParallel._launch",
    killer="tests.data_parallel.test_overlap.test_overlap_hides_most_of_its_communication_and_naive_nothing",
)
def overlap_blocks(self, i: int) -> None:
    """Overlap is as slow as naive: each hook waits for its all-reduce, so the backward waits too."""
    all_reduce(self._trained[i].grad, op="mean", group=self.group, pattern=self.pattern)


@mutant(
    target="data_parallel.train_overlap.OverlapDataParallel",
    killer="tests.data_parallel.test_narrated.test_overlap_equals_one_process",
    cause="not averaged over the ranks",
)
class overlap_hooks_capture_the_loop_variable(OverlapDataParallel):
    """Replicas drift apart: all hooks reduce the last gradient, because a lambda captures its loop
    variable.
    """

    def __init__(self, module: nn.Module, *args, **options) -> None:
        super().__init__(module, *args, **options)
        for parameter in self._trained[::-1]:
            replace_hook(parameter, lambda _: self._reduce(parameter))

    def _reduce(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and self._guard.is_synchronising:
            options = {"group": self.group, "pattern": self.pattern, "async_op": True}
            self._in_flight.append((parameter.grad, all_reduce(parameter.grad, op="mean", **options)))

    def finish_gradient_sync(self) -> None:
        self._wait_for_all()
        self._guard.synchronised()


@mutant(
    target="data_parallel.train_overlap.OverlapDataParallel",
    killer=(
        "tests.data_parallel.test_equivalence."
        "test_gradients_of_microbatches_add_up_to_those_of_the_full_batch"
    ),
    cause="not averaged over the ranks",
)
class overlap_of_the_last_microbatch(OverlapDataParallel):
    """With accumulation replicas drift apart: only the last microbatch's gradients are averaged over
    ranks.
    """

    def __init__(self, module: nn.Module, *args, **options) -> None:
        super().__init__(module, *args, **options)
        for parameter in self._trained:
            parameter.register_hook(self._reduce)

    def _reduce(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if self._guard.is_synchronising:
            all_reduce(gradient, op="mean", group=self.group, pattern=self.pattern)
        return gradient

    def _on_gradient(self, i: int) -> None:
        """Do nothing: the other hook does the work."""

    def finish_gradient_sync(self) -> None:
        """Do nothing: each hook has waited."""


@mutant(
    target="data_parallel.train_overlap.OverlapDataParallel.finish_gradient_sync",
    killer=(
        "tests.data_parallel.test_late_gradients."
        "test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all"
    ),
    cause="in different orders",
    fails_with="The ranks do not fit together",
)
def overlap_reduces_flags_before_gradients(self) -> None:
    """Training stops if one rank does not use a parameter: the flags pair with a gradient of another rank."""
    used = torch.tensor([parameter.grad is not None for parameter in self._trained], dtype=torch.uint8)
    all_reduce(used, op="max", group=self.group, pattern=self.pattern)
    unused = self._launcher.missing()
    for i in unused:
        if self._trained[i].grad is None:
            self._trained[i].grad = torch.zeros_like(self._trained[i])
        self._launcher.ready(i)
    self._wait_for_all()
    for i in unused:
        if not used[i]:
            self._trained[i].grad = None
    self._guard.synchronised()


@mutant(
    target="data_parallel.train_overlap.OverlapDataParallel.finish_gradient_sync",
    killer=(
        "tests.data_parallel.test_late_gradients."
        "test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all"
    ),
    cause="not averaged over the ranks",
)
def overlap_skips_what_no_rank_used(self) -> None:
    """Replicas drift apart if no rank uses a parameter: the gradients after it wait until it is ready."""
    used = torch.tensor([parameter.grad is not None for parameter in self._trained], dtype=torch.uint8)
    all_reduce(used, op="max", group=self.group, pattern=self.pattern)
    for i in self._launcher.missing():
        if used[i]:
            if self._trained[i].grad is None:
                self._trained[i].grad = torch.zeros_like(self._trained[i])
            self._launcher.ready(i)
    self._wait_for_all()
    self._guard.synchronised()


@mutant(
    target="data_parallel.sampler.DistributedSampler",
    killer=(
        "tests.data_parallel.test_sampler."
        "test_with_pad_or_drop_shares_have_equal_lengths_and_equal_those_of_torchs_sampler"
    ),
)
class sampler_of_uneven_shares(DistributedSampler):
    """Training hangs at the end of an epoch if the data does not divide: one rank has no last batch."""

    def __init__(self, num_examples, rank, world_size, seed=0, uneven="keep") -> None:
        super().__init__(num_examples, rank, world_size, seed, "keep")


@mutant(
    target="data_parallel.sampler.DistributedSampler",
    killer="tests.data_parallel.test_sampler.test_an_evaluation_on_kept_shares_counts_each_example_once",
)
class sampler_repeats_examples_in_evaluation(DistributedSampler):
    """The accuracy depends on the number of ranks: in an evaluation too the sampler repeats examples."""

    def __init__(self, num_examples, rank, world_size, seed=0, uneven="pad") -> None:
        super().__init__(num_examples, rank, world_size, seed, "pad" if uneven == "keep" else uneven)


@mutant(
    target="data_parallel.sampler.DistributedSampler.set_epoch",
    killer="tests.data_parallel.test_sampler.test_each_epoch_has_another_order",
    cause="the same again",
)
def sampler_without_set_epoch(self, epoch: int) -> None:
    """Every epoch has the same batches in the same order: `set_epoch` has no effect."""
    pass


@mutant(
    target="data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync",
    killer="tests.data_parallel.test_equivalence.test_a_parameter_has_a_gradient_on_all_ranks_or_on_none",
)
def unused_flags_ignored(self) -> None:
    """Training hangs when only some ranks use a parameter: each rank reduces the gradients that it has."""
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad, op="mean", group=self.group, pattern=self.pattern)


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel",
    killer="tests.data_parallel.test_equivalence.test_a_parameter_has_a_gradient_on_all_ranks_or_on_none",
)
class unused_get_zeros(BucketDataParallel):
    """Weight decay shrinks parameters that no rank uses: their gradients are zeros instead of none."""

    def finish_gradient_sync(self) -> None:
        super().finish_gradient_sync()
        for parameter, bucket in self._bucket_of.items():
            if parameter.grad is None:
                parameter.grad = bucket.views[parameter]


@mutant(
    target="data_parallel.flat.Flat.pieces",
    killer="tests.zero.test_zero_mutant_killers.test_every_number_of_every_parameter_is_in_one_ranks_shard",
    symptom="The last number of each shard never changes, and the losses look normal.",
)
def zero_shard_off_by_one(self, shard: Tensor) -> list[tuple[int, Tensor]]:
    """The last number of each shard never changes, because no rank owns it; the losses look normal."""
    pieces, offset, stop = [], 0, self.mine.stop - 1
    for size in self._sizes:
        begin, end = max(self.mine.start, offset), min(stop, offset + size)
        piece = shard[begin - self.mine.start : end - self.mine.start] if begin < end else shard[:0]
        pieces.append((max(0, begin - offset) if begin < end else 0, piece))
        offset += size
    return pieces
