"""Wrong implementations of pipelines."""

from exercises.mutants import mutant

TRAINING = "tests/pipeline_parallel/test_training.py::"
NARRATED = "tests/pipeline_parallel/test_narrated.py::"
BY_HAND = "tests/pipeline_parallel/test_by_hand.py::"
DEFERRED = "tests/pipeline_parallel/test_deferred.py::"

mutant(
    "pipeline_activations_kept",
    "1F1B needs as much memory as GPipe: activations are kept after the backward that has used them.",
    target="pipeline_parallel.pipeline.Pipeline.run_backward",
    changes={
        "self.kept.pop((microbatch, stage))": "self.kept[microbatch, stage]",
        "[dy])": "[dy], retain_graph=True)",
    },
    killer=TRAINING + "test_1f1b_holds_no_more_microbatches_than_ranks_come_after",
)

mutant(
    "pipeline_bias_not_deferred",
    "With split backwards biases do not learn: only the gradients of the weights are computed.",
    target="pipeline_parallel.deferred.SplitLinear.backward",
    changes={"if bias is not None and bias.requires_grad:\n    add_to(bias, rows_of_dy.sum(0))": ""},
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[zb_h1]",
)

mutant(
    "pipeline_buffers_counted_twice",
    (
        "With recomputation BatchNorm evaluates worse: the second forward of a microbatch enters its "
        "running statistics again."
    ),
    target="pipeline_parallel.stage.Stage.forward",
    changes={", context_fn=again": ""},
    killer=TRAINING + "test_batch_norm_counts_each_microbatch_once[True]",
)

mutant(
    "pipeline_by_hand_gradients_in_reverse",
    "Gradients are wrong: ranks run the backwards in different orders and mix up the microbatches.",
    target="pipeline_parallel.train_afab.AllForwardAllBackward.backward_of",
    changes={"self.kept.pop(i)": "self.kept.pop(i if self.rank == self.last else max(self.kept))"},
    killer=NARRATED + "test_gpipe_by_hand_equals_one_process",
    symptom="With GPipe by hand the loss is right, and the gradients are wrong.",
)

mutant(
    "pipeline_by_hand_sends_the_activation_back",
    "All stages but the last learn nonsense: an activation is sent back instead of its gradient.",
    target="pipeline_parallel.train_model_parallel.ModelParallel.step",
    changes={"send(self.gradient_of(given),": "send(given.detach(),"},
    killer=NARRATED + "test_model_parallel_equals_one_process",
)

mutant(
    "pipeline_by_hand_takes_another_microbatchs_gradient",
    "In 1F1B gradients are wrong: a backward takes the number of the forward before it.",
    target="pipeline_parallel.train_1f1b_by_hand.OneForwardOneBackward.step",
    changes={
        "self.backward_of(i - warmup)": "self.backward_of(i)",
        "for i in range(m - warmup, m):": "for i in range(warmup):",
    },
    killer=NARRATED + "test_one_f_one_b_by_hand_equals_one_process",
)

mutant(
    "pipeline_by_hand_warms_up_too_little",
    "1F1B is slower than GPipe: with a forward too few at the beginning, ranks wait for each other's work.",
    target="pipeline_parallel.train_1f1b_by_hand.OneForwardOneBackward.step",
    changes={"min(self.last - self.rank, m)": "min(max(0, self.last - self.rank - 1), m)"},
    killer=BY_HAND + "test_a_step_by_hand_has_the_order_of_its_table_on_any_number_of_ranks[1f1b]",
)

mutant(
    "pipeline_by_hand_warms_up_too_much",
    "Each rank needs memory for one microbatch more than 1F1B should: it begins with a forward too many.",
    target="pipeline_parallel.train_1f1b_by_hand.OneForwardOneBackward.step",
    changes={"min(self.last - self.rank, m)": "min(self.last - self.rank + 1, m)"},
    killer=BY_HAND + "test_a_step_by_hand_holds_as_many_microbatches_as_it_must[1f1b]",
)

mutant(
    "pipeline_clipped_by_the_local_norm",
    "Layers learn at different rates: each rank clips its stages by the norm of their gradients only.",
    target="pipeline_parallel.pipeline.Pipeline.clip_grad_norm_",
    changes={
        "clip_grad_norm_(self.parameters(), max_norm, [self.group], norm_type, uncounted, self.device)": (
            "nn.utils.clip_grad_norm_(self.parameters(), max_norm)"
        ),
    },
    killer=TRAINING + "test_the_norm_is_that_of_all_stages",
)

mutant(
    "pipeline_complex_weight_gradient",
    "With split backwards complex layers learn nonsense: dW is made of x, and not of its conjugate.",
    target="pipeline_parallel.deferred.SplitLinear.backward",
    changes={"x.flatten(0, -2).conj()": "x.flatten(0, -2)"},
    killer=DEFERRED + "test_a_complex_layers_gradients_are_autograds",
)

mutant(
    "pipeline_cut_by_the_largest_stage_only",
    "Beside an expensive stage the others are uneven: they count only if they are more expensive.",
    target="pipeline_parallel.stage.cut",
    changes={"(cost**2 + squares, (-end, *ends))": "(max(cost**2, squares), (-end, *ends))"},
    killer="tests/pipeline_parallel/test_stage.py::test_beside_an_expensive_part_the_others_are_even",
)

mutant(
    "pipeline_deadlock_on_an_even_number_of_ranks",
    (
        "With tied weights training hangs on 2 or 4 ranks but not on 3: two ranks wait for each other"
        " to receive."
    ),
    target="pipeline_parallel.own_stages.OwnStages.finish_gradient_sync",
    changes={
        (
            "arriving = irecv(theirs, peer, self.channels.of(peer, self.rank))\n"
            "leaving = isend(gradient.contiguous(), peer, self.channels.of(self.rank, peer))\n"
            "arriving.wait()\n"
            "leaving.wait()"
        ): (
            "hops = (peer - self.rank) % (1 + max(self.rank_of.values()))\n"
            "if hops % 2 == 1:\n"
            "    isend(gradient, peer, self.group).wait()\n"
            "    recv(theirs, peer, self.group)\n"
            "else:\n"
            "    recv(theirs, peer, self.group)\n"
            "    isend(gradient, peer, self.group).wait()"
        ),
    },
    killer=TRAINING + "test_tied_gradients_are_exchanged_whether_the_number_of_ranks_is_odd_or_even",
    cause="deadlock",
    fails_with="waited until the timeout",
)

mutant(
    "pipeline_frozen_gets_zeros",
    "Weight decay shrinks a frozen tied embedding: its gradient is zeros instead of none.",
    target="pipeline_parallel.own_stages.OwnStages.finish_gradient_sync",
    changes={"if not copy.requires_grad:\n    continue": ""},
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[1f1b]",
)

mutant(
    "pipeline_full_backward_forgets_weights",
    "With some backwards split and others not, the stages with full backwards do not learn.",
    target="pipeline_parallel.pipeline.Pipeline.run_forward",
    changes={"if place in self.split else None": "if self.split else None"},
    killer=TRAINING + "test_full_backwards_may_stand_beside_split_ones",
)

mutant(
    "pipeline_input_taken_for_a_weight",
    (
        "With split backwards the stages before attention-like layers learn nonsense: an input that stands "
        "where linear() takes the weight is taken for one, and has no gradient when it is sent."
    ),
    target="pipeline_parallel.deferred.can_be_split",
    changes={"type(each) is nn.Parameter and ": ""},
    killer=DEFERRED
    + "test_in_every_use_of_a_linear_layer_gradients_are_autograds[the input stands where the weight does]",
)

mutant(
    "pipeline_last_microbatchs_activations",
    "With several microbatches gradients are wrong: each backward uses the last forward's activations.",
    target="pipeline_parallel.pipeline.Pipeline.run_backward",
    changes={"self.kept.pop((microbatch, stage))": "self.kept.popitem()[1]"},
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[1f1b]",
)

mutant(
    "pipeline_loss_not_divided",
    "With many microbatches training diverges: gradients are too large by the number of microbatches.",
    target="pipeline_parallel.pipeline.Pipeline.run_forward",
    changes={"if target is not None:\n    y = y * self.shares[microbatch]": ""},
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[1f1b]",
    cause="where a mean is due",
)

mutant(
    "pipeline_loss_of_the_last_microbatch",
    "The printed loss is noisy and too small: it has only the last microbatch's part of the mean.",
    target="pipeline_parallel.pipeline.Pipeline.hand_over",
    changes={"self.losses.append(made)": "self.losses[:] = [made]"},
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[1f1b]",
    cause="only the last one used",
    symptom="The printed loss is noisy and too small, and training is right.",
)

mutant(
    "pipeline_nothing_sent_for_a_detached_stage",
    (
        "With a layer under no_grad training hangs: the stage has no gradient of its input, sends nothing, "
        "and the stage before waits."
    ),
    target="pipeline_parallel.own_stages.OwnStages.gradient_of",
    changes={"torch.zeros_like(given) if given.grad is None else given.grad": "given.grad"},
    killer=TRAINING + "test_a_stage_through_which_no_gradient_flows_gives_zeros[1f1b]",
    symptom="With a layer under no_grad training hangs.",
    fails_with=("waited until the timeout", "lost the connection"),
)

mutant(
    "pipeline_receives_in_order_of_need",
    "Stages receive the wrong tensors of the right shape: receives are not in the order of the sends.",
    target="pipeline_parallel.messages.receives_before",
    changes={
        "while message in queue:\n    posted.append(queue.popleft())": (
            "if message in queue:\n    queue.remove(message)\n    posted.append(message)"
        ),
    },
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[zb_v]",
)

mutant(
    "pipeline_recomputed_with_other_layers",
    (
        "With split backwards a block that checkpoints itself raises an error: the backward computes its "
        "layers again as one node each, where the forward made two."
    ),
    target="pipeline_parallel.pipeline.Pipeline.run_backward",
    changes={
        "with self.splitting((microbatch, stage)):\n    torch.autograd.backward([edge], [dy])": (
            "torch.autograd.backward([edge], [dy])"
        )
    },
    killer=TRAINING + "test_blocks_that_checkpoint_themselves_train_in_every_schedule[False]",
    symptom="With split backwards a block that checkpoints itself raises an error.",
    fails_with="CheckpointError",
)

mutant(
    "pipeline_recomputed_with_other_masks",
    "With recomputation and dropout gradients are wrong: the second forward draws other dropout masks.",
    target="pipeline_parallel.stage.Stage.forward",
    changes={"use_reentrant=False,": "use_reentrant=False, preserve_rng_state=False,"},
    killer=TRAINING + "test_recomputation_drops_out_the_same",
)

mutant(
    "pipeline_tied_averaged",
    "A tied embedding learns at half the rate: its two gradients are averaged instead of added.",
    target="pipeline_parallel.own_stages.OwnStages.finish_gradient_sync",
    changes={"gradient.add_(theirs)": "gradient.add_(theirs).div_(2)"},
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[1f1b]",
    cause="divided by their number once too often",
)

mutant(
    "pipeline_tied_copies_differ",
    (
        "Tied weights differ from the first step on: what the second rank receives goes into a clone "
        "of its copy."
    ),
    target="pipeline_parallel.own_stages.OwnStages._tie",
    changes={"broadcast(parameter.data,": "broadcast(parameter.detach().clone(),"},
    killer=TRAINING + "test_tied_copies_are_equal_before_the_first_step",
    cause="Is a broadcast missing",
    symptom="The two copies of a tied weight differ from the first step on.",
)

mutant(
    "pipeline_tied_not_synchronised",
    "Each rank trains its own copy of a shared weight: the sum of both gradients is not stored in .grad.",
    target="pipeline_parallel.own_stages.OwnStages.finish_gradient_sync",
    changes={"copy.grad = gradient.add_(theirs)": "gradient = gradient + theirs"},
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[1f1b]",
    symptom="The embedding and the head share a weight, and after some steps they do not.",
)

mutant(
    "pipeline_weight_gradient_of_the_last_layer",
    "Only one layer of a stage learns: the loop over the deferred gradients ends too early.",
    target="pipeline_parallel.deferred.compute_gradients",
    changes={"while later:": "if later:"},
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[zb_h1]",
)

mutant(
    "pipeline_weight_gradient_twice",
    "With zero bubble schedules weight gradients are twice too large: the input backward computes them too.",
    target="pipeline_parallel.deferred.SplitLinear.backward",
    changes={
        "if ctx.needs_input_grad[1] else None, None, None": (
            "if ctx.needs_input_grad[1] else None, dy.flatten(0, -2).t() @ x.flatten(0, -2), None"
        ),
    },
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[zb_h1]",
    cause="added up twice",
)

mutant(
    "pipeline_weight_gradient_with_a_graph",
    "Memory grows in every step: weight gradients are computed with a graph, which keeps their inputs.",
    target="pipeline_parallel.deferred.compute_gradients",
    changes={"@torch.no_grad()": ""},
    killer=TRAINING + "test_when_weight_gradients_are_computed_nothing_they_needed_is_left",
)

mutant(
    "pipeline_zeroed_between_microbatches",
    "Only the last microbatch trains the model: each backward clears the gradients of the earlier ones.",
    target="pipeline_parallel.pipeline.Pipeline.run_backward",
    changes={"if edge is not None:": "self.stages[str(stage)].zero_grad()\nif edge is not None:"},
    killer=TRAINING + "test_two_ranks_train_with_microbatches_as_one_process[1f1b]",
    cause="cleared",
    symptom="With more microbatches the gradients of a batch become smaller.",
)
