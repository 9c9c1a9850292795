"""Wrong implementations of data parallelism."""

from collections import deque

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce, broadcast
from data_parallel.train_bucket_overlap import Bucket, fill
from exercises.mutants import mutant
from lab.models.model import loss_of
from training.guard import Guard


@mutant(
    target="data_parallel.train_naive_grad_accumulation.accumulate",
    killer="tests.data_parallel.test_narrated.test_accumulation_equals_one_process",
    cause="added up 3 times where a mean is due",
    symptom="With SGD, twice as many microbatches double the learning rate; with Adam the loss looks normal.",
)
def accumulated_loss_not_divided(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """With SGD, twice as many microbatches double the learning rate: their losses are not divided."""
    total = torch.zeros((), device=parts[0][0].device)
    for x, y in parts:
        loss = loss_of(model(x), y)
        loss.backward()
        total += loss.detach() / len(parts)
    return total


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel._expect_gradients",
    killer="tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="cleared",
)
def bucket_cleared_for_the_next_step(self) -> None:
    """The loss does not fall: buckets are set to zero after the reduction, and with them the gradients."""
    for bucket in self.buckets:
        bucket.flat.zero_()
        bucket.missing = set(bucket.views)
    self._to_launch = deque(self.buckets)
    self._in_flight = []
    self._guard.synchronised()


@mutant(
    target="data_parallel.train_bucket_overlap.Bucket.move_in",
    killer=(
        "tests.data_parallel.test_equivalence."
        "test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros"
    ),
    cause="look at what each rank puts in",
    symptom="A parameter that is not used in a step moves all the same.",
)
def bucket_keeps_the_last_steps_gradient(self, parameter: nn.Parameter) -> None:
    """A parameter that is not used in a step moves all the same, by its gradient of an earlier step."""
    view = self.views[parameter]
    if parameter.grad is not None and parameter.grad is not view:
        view.copy_(parameter.grad)
    parameter.grad = view  # with what an earlier step left in it


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel._on_gradient",
    killer="tests.data_parallel.test_equivalence.test_hooks_on_one_rank_may_fire_in_another_order",
    cause=("must agree on one order", "not averaged over the ranks"),
    symptom="When one rank computes gradients in another order, training hangs, or its buckets are wrong.",
)
def bucket_launched_as_soon_as_complete(self, parameter: nn.Parameter) -> None:
    """When one rank computes gradients in another order, different buckets are averaged, or all ranks
    hang.
    """
    if self._guard.gradient_of(parameter) is None:
        return
    bucket = self._bucket_of[parameter]
    bucket.move_in(parameter)
    if self._guard.is_synchronising:
        bucket.missing.remove(parameter)
        if not bucket.missing:
            self._to_launch.remove(bucket)
            self._launch(bucket)


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel.__init__",
    killer="tests.data_parallel.test_equivalence.test_ranks_start_from_rank_0s_parameters_and_buffers",
    cause="broadcast missing",
)
def bucket_missing_broadcast(
    self,
    module: nn.Module,
    group: Group = None,
    pattern: str | None = None,
    bucket_mb: float = 1.0,
    first_mb: float = 0.25,
) -> None:
    """Replicas never agree: their gradients are averaged, but their initial weights are different."""
    nn.Module.__init__(self)
    self.module, self.group, self.pattern = module, group, pattern
    self._guard = Guard(module)
    self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    filled = fill(reversed(self.trained), min(first_mb, bucket_mb), bucket_mb)
    self.buckets = [Bucket(parameters) for parameters in filled]
    self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.views}
    for parameter in self.trained:
        parameter.register_post_accumulate_grad_hook(self._on_gradient)
    self._expect_gradients()


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel.finish_gradient_sync",
    killer=(
        "tests.data_parallel.test_overlap."
        "test_a_backward_does_not_wait_for_its_messages_and_their_results_are_awaited"
    ),
    cause="the average is not what is used",
)
def bucket_not_waited_for(self) -> None:
    """Replicas drift apart, and only on a slow network: a step begins while its last buckets are still
    sent.
    """
    while self._to_launch:
        self._launch(self._to_launch.popleft())
    self._expect_gradients()


@mutant(
    target="data_parallel.train_bucket_overlap.BucketDataParallel._launch",
    killer="tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="sum over ranks that should be a mean",
    symptom="With SGD, twice as many ranks double the learning rate, and with Adam the loss looks normal.",
)
def bucket_summed(self, bucket: Bucket) -> None:
    """Buckets hold the sum over ranks: with SGD, twice as many ranks double the learning rate."""
    for parameter in bucket.missing:
        bucket.move_in(parameter)
    self._in_flight.append(all_reduce(bucket.flat, "sum", self.group, async_op=True, pattern=self.pattern))


@mutant(
    target="data_parallel.train_bucket_overlap.Bucket.move_in",
    killer="tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="the average is not what is used",
)
def bucket_without_views(self, parameter: nn.Parameter) -> None:
    """Replicas drift apart: the optimizer uses each rank's own gradients, which are not views of the
    buckets.
    """
    if parameter.grad is None:
        self.views[parameter].zero_()
    else:
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
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad, op="sum", group=self.group, pattern=self.pattern)


@mutant(
    target="data_parallel.train_overlap.OverlapDataParallel._on_gradient",
    killer="tests.data_parallel.test_equivalence.test_hooks_on_one_rank_may_fire_in_another_order",
    cause=("must agree on one order", "not averaged over the ranks"),
    symptom="When one rank computes gradients in another order, training hangs, or the gradients are wrong.",
)
def launched_as_soon_as_ready(self, parameter: nn.Parameter) -> None:
    """If one rank computes gradients in another order, ranks average different parameters' gradients, or
    hang.
    """
    if self._guard.gradient_of(parameter) is not None and self._guard.is_synchronising:
        self._to_launch = deque(other for other in self._to_launch if other is not parameter)
        self._launch(parameter)


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
    self._guard = Guard(module)


@mutant(
    target="data_parallel.train_overlap.OverlapDataParallel._launch",
    killer=(
        "tests.data_parallel.test_overlap."
        "test_messages_are_launched_in_the_backward_and_hidden_and_naive_sends_after_it"
    ),
)
def overlap_blocks(self, parameter: nn.Parameter) -> None:
    """Overlap is as slow as naive: each hook waits for its all-reduce, so the backward waits too."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    all_reduce(parameter.grad, "mean", self.group, pattern=self.pattern)


@mutant(
    target="data_parallel.train_overlap.OverlapDataParallel.finish_gradient_sync",
    killer=(
        "tests.data_parallel.test_equivalence."
        "test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros"
    ),
    cause="There is no value of",
)
def overlap_forgets_what_no_hook_started(self) -> None:
    """Replicas drift apart if a parameter is not used: the gradients after it wait for it, and are never
    sent.
    """
    for work in self._in_flight:
        work.wait()
    self._expect_gradients()


@mutant(
    target="data_parallel.train_overlap.OverlapDataParallel.__init__",
    killer=(
        "tests.data_parallel.test_equivalence."
        "test_two_forwards_before_one_backward_and_several_backwards_in_one_no_sync_add_up"
    ),
    cause="not averaged over the ranks",
)
def overlap_of_the_last_microbatch(
    self, module: nn.Module, group: Group = None, pattern: str | None = None
) -> None:
    """With accumulation replicas drift apart: only the last microbatch's gradients are averaged over
    ranks.
    """
    nn.Module.__init__(self)
    self.module, self.group, self.pattern = module, group, pattern
    self._guard = Guard(module)
    for tensor in [*module.parameters(), *module.buffers()]:
        broadcast(tensor.data, root=0, group=group)
    self.trained = []  # nothing is left for finish_gradient_sync()

    def reduce(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if self._guard.is_synchronising:
            all_reduce(gradient, "mean", group, pattern=pattern)
        return gradient

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(reduce)
    self._expect_gradients()


@mutant(
    target="data_parallel.sampler.DistributedSampler.__init__",
    killer=(
        "tests.data_parallel.test_sampler."
        "test_with_pad_or_drop_shares_have_equal_lengths_and_equal_those_of_torchs_sampler"
    ),
)
def sampler_of_uneven_shares(self, num_examples, rank, world_size, seed=0, uneven="pad") -> None:
    """Training hangs at the end of an epoch if the data does not divide: one rank has no last batch."""
    self.num_examples, self.rank, self.world_size, self.seed = num_examples, rank, world_size, seed
    self._total = num_examples
    self.epoch = 0


@mutant(
    target="data_parallel.sampler.DistributedSampler.__init__",
    killer="tests.data_parallel.test_sampler.test_an_evaluation_on_kept_shares_counts_each_example_once",
)
def sampler_repeats_examples_in_evaluation(
    self, num_examples, rank, world_size, seed=0, uneven="pad"
) -> None:
    """The accuracy depends on the number of ranks: in an evaluation too the sampler repeats examples."""
    self.num_examples, self.rank, self.world_size, self.seed = num_examples, rank, world_size, seed
    rounds = num_examples // world_size if uneven == "drop" else -(-num_examples // world_size)
    self._total = rounds * world_size
    self.epoch = 0


@mutant(
    target="data_parallel.sampler.DistributedSampler.set_epoch",
    killer="tests.data_parallel.test_sampler.test_each_epoch_has_another_order_that_can_be_repeated",
    cause="the same again",
)
def sampler_without_set_epoch(self, epoch: int) -> None:
    """Every epoch has the same batches in the same order: `set_epoch` has no effect."""
    pass


@mutant(
    target="data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync",
    killer=(
        "tests.data_parallel.test_equivalence."
        "test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros"
    ),
    cause="There is no value of",
)
def unused_flags_ignored(self) -> None:
    """Training hangs when only some ranks use a parameter: each rank reduces the gradients that it has."""
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad, op="mean", group=self.group, pattern=self.pattern)
