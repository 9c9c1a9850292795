"""Wrong implementations of data parallelism."""

from exercises.mutants import mutant

NARRATED = "tests/data_parallel/test_narrated.py::"
REPLICAS = "tests/data_parallel/test_replicas.py::"
WRAPPERS = "tests/test_wrappers.py::"
SAMPLER = "tests/data_parallel/test_sampler.py::"

mutant(
    "accumulated_loss_not_divided",
    "With SGD, twice as many microbatches double the learning rate: their losses are not divided.",
    target="data_parallel.train_naive_grad_accumulation.accumulate",
    changes={
        "loss_of(model(x), y, num_targets)": "loss_of(model(x), y)",
        "total += loss.detach()": "total += loss.detach() / len(parts)",
    },
    killer=NARRATED + "test_accumulation_equals_one_process",
    cause="added up 3 times where a mean is due",
    symptom="With SGD, twice as many microbatches double the learning rate; with Adam the loss looks normal.",
)

mutant(
    "accumulated_means_of_microbatches",
    "A long text weighs as much as a short one: microbatches count alike, whatever their valid targets.",
    target="data_parallel.train_naive_grad_accumulation.accumulate",
    changes={"loss_of(model(x), y, num_targets)": "loss_of(model(x), y) / len(parts)"},
    killer=NARRATED + "test_microbatches_count_by_their_numbers_of_valid_targets",
    cause="does each count alike",
    symptom="With padded texts the gradients depend on how a batch is divided into microbatches.",
)

mutant(
    "bucket_cleared_for_the_next_step",
    "The loss does not fall: buckets are set to zero after the reduction, and with them the gradients.",
    target="data_parallel.train_bucket_overlap.BucketDataParallel._expect_gradients",
    changes={"bucket.missing = set(bucket.views)": "bucket.flat.zero_()\nbucket.missing = set(bucket.views)"},
    killer=REPLICAS + "test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="cleared",
)

mutant(
    "bucket_keeps_the_last_steps_gradient",
    "A parameter that is not used in a step moves all the same, by its gradient of an earlier step.",
    target="data_parallel.train_bucket_overlap.Bucket.move_in",
    changes={
        "if parameter.grad is None:\n    view.zero_()\nelif parameter.grad is not view:": (
            "if parameter.grad is not None and parameter.grad is not view:"
        ),
    },
    killer=REPLICAS + "test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros",
    symptom="A parameter that is not used in a step moves all the same.",
)

mutant(
    "bucket_launched_as_soon_as_complete",
    "When one rank computes gradients in another order, different buckets are averaged, or all ranks hang.",
    target="data_parallel.train_bucket_overlap.BucketDataParallel._on_gradient",
    changes={
        (
            "while self._to_launch and not self._to_launch[0].missing:\n"
            "    self._launch(self._to_launch.popleft())"
        ): "if not bucket.missing:\n    self._to_launch.remove(bucket)\n    self._launch(bucket)",
    },
    killer=WRAPPERS + "test_one_rank_may_compute_gradients_in_another_order[a bucket for each]",
    symptom="When one rank computes gradients in another order, training hangs, or its buckets are wrong.",
)

mutant(
    "bucket_missing_broadcast",
    "Replicas never agree: their gradients are averaged, but their initial weights are different.",
    target="data_parallel.train_bucket_overlap.BucketDataParallel.__init__",
    changes={
        (
            "for tensor in [*module.parameters(), *module.buffers()]:\n"
            "    broadcast(tensor.data, root=0, group=group)"
        ): "",
    },
    killer=WRAPPERS + "test_two_ranks_train_as_one_process[buckets]",
    cause="broadcast missing",
)

mutant(
    "bucket_not_waited_for",
    "Replicas drift apart, and only on a slow network: a step begins while its last buckets are still sent.",
    target="data_parallel.train_bucket_overlap.BucketDataParallel.finish_gradient_sync",
    changes={"for work in self.in_flight:\n    work.wait()": ""},
    killer=REPLICAS + "test_a_backward_does_not_wait_for_its_messages_and_their_results_are_awaited",
    cause="the average is not what is used",
)

mutant(
    "bucket_waited_for_in_its_hook",
    "Nothing is hidden: the hook that sends a bucket waits for it, and the backward with it.",
    target="data_parallel.train_bucket_overlap.BucketDataParallel._launch",
    changes={
        'self.in_flight.append(all_reduce(bucket.flat, "mean", self.group, async_op=True))': (
            'self.in_flight.append(all_reduce(bucket.flat, "mean", self.group, async_op=True))\n'
            "self.in_flight[-1].wait()"
        )
    },
    killer="tests/data_parallel/test_replicas.py::"
    "test_a_backward_does_not_wait_for_its_messages_and_their_results_are_awaited",
    symptom="Buckets leave during the backward, and a step takes as long as without overlap.",
)

mutant(
    "bucket_summed",
    "Buckets hold the sum over ranks: with SGD, twice as many ranks double the learning rate.",
    target="data_parallel.train_bucket_overlap.BucketDataParallel._launch",
    changes={'"mean"': '"sum"'},
    killer=REPLICAS + "test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="sum over ranks that should be a mean",
    symptom="With SGD, twice as many ranks double the learning rate, and with Adam the loss looks normal.",
)

mutant(
    "bucket_views_in_another_order",
    "A fused optimizer updates other elements of weights with permuted strides: gradients are contiguous.",
    target="data_parallel.train_bucket_overlap.Bucket.__init__",
    changes={"place.as_strided(p.shape, torch.empty_like(p).stride())": "place.view(p.shape)"},
    killer=WRAPPERS + "test_fused_optimizers_find_gradients_in_the_order_of_their_parameters",
    symptom="A convolution in channels_last trains worse with a fused optimizer than without one.",
)

mutant(
    "bucket_without_views",
    "Replicas drift apart: the optimizer uses each rank's own gradients, which are not views of the buckets.",
    target="data_parallel.train_bucket_overlap.Bucket.move_in",
    changes={"parameter.grad = view": ""},
    killer=REPLICAS + "test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="the average is not what is used",
)

mutant(
    "gradient_summed",
    "Gradients are summed, not averaged: with SGD training diverges on many ranks, and Adam hides the error.",
    target="data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync",
    changes={'"mean"': '"sum"'},
    killer=REPLICAS + "test_a_gradient_is_the_mean_over_ranks_and_not_their_sum",
    cause="sum over ranks that should be a mean",
    symptom="With SGD training diverges on many ranks, and with Adam the loss looks normal.",
)

mutant(
    "launched_as_soon_as_ready",
    (
        "If one rank computes gradients in another order, ranks average different parameters' "
        "gradients, or hang."
    ),
    target="data_parallel.train_overlap.OverlapDataParallel._on_gradient",
    changes={
        (
            "self._complete.add(parameter)\n"
            "while self._to_launch and self._to_launch[0] in self._complete:\n"
            "    self._launch(self._to_launch.popleft())"
        ): (
            "self._to_launch = deque(other for other in self._to_launch if other is not parameter)\n"
            "self._launch(parameter)"
        ),
    },
    killer=WRAPPERS + "test_one_rank_may_compute_gradients_in_another_order[overlap]",
    symptom="When one rank computes gradients in another order, training hangs, or the gradients are wrong.",
)

mutant(
    "missing_broadcast",
    "Ranks start from different random weights: the loss falls on each rank, but replicas never agree.",
    target="data_parallel.train_naive.NaiveDataParallel.__init__",
    changes={
        (
            "for tensor in [*module.parameters(), *module.buffers()]:\n"
            "    broadcast(tensor.data, root=0, group=group)"
        ): "",
    },
    killer=WRAPPERS + "test_two_ranks_train_as_one_process[naive]",
    cause="broadcast missing",
    symptom="The loss falls on each rank, but the replicas never agree.",
)

mutant(
    "overlap_blocks",
    "Overlap is as slow as naive: each hook waits for its all-reduce, so the backward waits too.",
    target="data_parallel.train_overlap.OverlapDataParallel._launch",
    changes={
        'self.in_flight.append(all_reduce(parameter.grad, "mean", self.group, async_op=True))': (
            'all_reduce(parameter.grad, "mean", self.group, async_op=True).wait()'
        )
    },
    killer=REPLICAS + "test_a_backward_does_not_wait_for_its_messages_and_their_results_are_awaited",
)

mutant(
    "overlap_forgets_what_no_hook_started",
    (
        "Replicas drift apart if a parameter is not used: the gradients after it wait for it, and are"
        " never sent."
    ),
    target="data_parallel.train_overlap.OverlapDataParallel.finish_gradient_sync",
    changes={"while self._to_launch:\n    self._launch(self._to_launch.popleft())": ""},
    killer=REPLICAS + "test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros",
)

mutant(
    "overlap_of_the_last_microbatch",
    "With accumulation replicas drift apart: only the last microbatch's gradients are averaged over ranks.",
    target="data_parallel.train_overlap.OverlapDataParallel.__init__",
    changes={
        (
            "self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]\n"
            "for parameter in self.trained:\n"
            "    parameter.register_post_accumulate_grad_hook(self._on_gradient)"
        ): (
            "self.trained = []\n"
            "\n"
            "def reduce(gradient):\n"
            "    gradient = gradient.clone()\n"
            "    if self.require_backward_grad_sync:\n"
            '        all_reduce(gradient, "mean", group)\n'
            "    return gradient\n"
            "\n"
            "for parameter in module.parameters():\n"
            "    if parameter.requires_grad:\n"
            "        parameter.register_hook(reduce)"
        ),
    },
    killer=REPLICAS + "test_two_forwards_before_one_backward_and_several_backwards_in_one_no_sync_add_up",
    cause="not averaged over the ranks",
)

mutant(
    "sampler_of_uneven_shares",
    "Training hangs at the end of an epoch if the data does not divide: one rank has no last batch.",
    target="data_parallel.sampler.DistributedSampler.__init__",
    changes={'{"pad": padded, "drop": whole_rounds, "keep": num_examples}[uneven]': "num_examples"},
    killer=SAMPLER + "test_with_pad_or_drop_shares_have_equal_lengths_and_equal_those_of_torchs_sampler",
)

mutant(
    "sampler_repeats_examples_in_evaluation",
    "The accuracy depends on the number of ranks: in an evaluation too the sampler repeats examples.",
    target="data_parallel.sampler.DistributedSampler.__init__",
    changes={'"keep": num_examples': '"keep": padded'},
    killer=SAMPLER + "test_an_evaluation_on_kept_shares_counts_each_example_once",
)

mutant(
    "sampler_without_set_epoch",
    "Every epoch has the same batches in the same order: `set_epoch` has no effect.",
    target="data_parallel.sampler.DistributedSampler.set_epoch",
    changes={"self.epoch = epoch": "pass"},
    killer=SAMPLER + "test_each_epoch_has_another_order_that_can_be_repeated",
)

mutant(
    "unused_flags_ignored",
    "Training hangs when only some ranks use a parameter: each rank reduces the gradients that it has.",
    target="data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync",
    changes={
        (
            "if parameter.grad is None:\n"
            "    parameter.grad = torch.zeros_like(parameter)\n"
            'all_reduce(parameter.grad, "mean", self.group)'
        ): 'if parameter.grad is not None:\n    all_reduce(parameter.grad, "mean", self.group)',
    },
    killer=REPLICAS + "test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros",
)
