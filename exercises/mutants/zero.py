"""Wrong implementations of ZeRO."""

from exercises.mutants import mutant

WRAPPERS = "tests/test_wrappers.py::"
BLOCKS = "tests/zero/test_blocks.py::"
COSTS = "tests/zero/test_costs.py::"
NARRATED = "tests/zero/test_narrated.py::"

mutant(
    "zero1_not_gathered",
    "In stage 1 replicas drift apart: each rank sees the updates of its own shard only.",
    target="zero.train_zero1.ZeroOptimizer.step",
    changes={"self.gather_parameters()": ""},
    killer=WRAPPERS + "test_two_ranks_train_as_one_process[zero1]",
)

mutant(
    "zero1_summed",
    "In stage 1 with SGD the learning rate seems to grow with the number of ranks: shards hold sums.",
    target="zero.train_zero1.ZeroOptimizer._launch",
    changes={'"mean"': '"sum"'},
    killer=WRAPPERS + "test_two_ranks_train_as_one_process[zero1]",
    cause="sum over ranks that should be a mean",
)

mutant(
    "zero1_unused_keep_the_last_steps_gradient",
    "A layer that few examples use is trained too often: a rank that does not use it sends old numbers.",
    target="zero.train_zero1.ZeroOptimizer._move_in",
    changes={
        "if parameter.grad is None:\n    view.zero_()\nelif parameter.grad is not view:": (
            "if parameter.grad is not None and parameter.grad is not view:"
        ),
    },
    killer=WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[zero1]",
)

mutant(
    "zero1_last_microbatch_only",
    "In stage 1 accumulation uses the last microbatch only: its gradients replace the earlier ones.",
    target="zero.train_zero1.ZeroOptimizer._move_in",
    changes={"parameter.grad = None if self.require_backward_grad_sync else view": "parameter.grad = None"},
    killer=WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[zero1]",
    cause="only the last one used",
)

mutant(
    "zero_order_of_each_rank",
    "Layers get each other's gradients when ranks compute their gradients in different orders.",
    target="zero.train_zero1.ZeroOptimizer._on_gradient",
    changes={
        (
            "while self._to_launch and not self._to_launch[0].missing:\n"
            "    self._launch(self._to_launch.popleft())"
        ): "if not bucket.missing:\n    self._to_launch.remove(bucket)\n    self._launch(bucket)",
    },
    killer=WRAPPERS + "test_one_rank_may_compute_gradients_in_another_order[zero2]",
    symptom="When ranks compute their gradients in different orders, layers learn from wrong gradients.",
)

mutant(
    "zero2_buckets_add_up",
    "On a slow link stage 2 needs as much memory as stage 1: buckets fill faster than they are sent.",
    target="zero.train_zero2.ZeroGradientOptimizer._launch",
    changes={"if len(self._in_flight) == MOST_IN_FLIGHT:\n    self._wait_for_oldest()": ""},
    killer=COSTS + "test_at_most_three_buckets_of_gradients_are_alive",
)

mutant(
    "zero2_keeps_the_full_gradient",
    "Stage 2 needs as much memory as stage 1: each shard is a view, which keeps its full bucket in memory.",
    target="zero.train_zero2.ZeroGradientOptimizer._wait_for_oldest",
    changes={
        ".clone()": "",
        "bucket.gradients.untyped_storage().resize_(0)": "",
    },
    killer=COSTS + "test_between_steps_a_rank_holds_what_the_formula_says_and_nothing_else",
)

mutant(
    "zero2_last_microbatch_only",
    "In stage 2 accumulation uses the last microbatch only: its gradients replace the earlier ones.",
    target="zero.train_zero2.ZeroGradientOptimizer._wait_for_oldest",
    changes={"work.wait()": "work.wait()\nfor shard in bucket.shards:\n    shard.tensor.grad = None"},
    killer=WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[zero2]",
    cause="only the last one used",
)

mutant(
    "zero3_by_hand_not_freed_after_the_forward",
    "The forward ends with all blocks in memory: none is freed until the backward reaches another one.",
    target="zero.train_zero3_textbook.TextbookFullyShardedDataParallel._after_forward",
    changes={"if not is_in_backward():\n    unit.free()": ""},
    killer=NARRATED + "test_zero3_by_hand_equals_one_process",
    symptom="In the textbook's stage 3 the forward ends with all blocks in memory.",
)

mutant(
    "zero3_by_hand_summed",
    "In the textbook's stage 3 SGD steps are n times too long: the shards get the sum of the gradients.",
    target="zero.train_zero3_textbook.Unit.end_backward",
    changes={'"mean"': '"sum"'},
    killer=WRAPPERS + "test_two_ranks_train_as_one_process[zero3_textbook]",
    cause="sum over ranks that should be a mean",
)

mutant(
    "zero3_prefetches_the_wrong_block",
    "Results are right but each backward waits: the block that is prefetched has been used already.",
    target="zero.train_zero3.FullyShardedDataParallel._before_backward",
    changes={"self.blocks[i - 1] if i > 1 else []": "self.blocks[i + 1] if i + 1 < len(self.blocks) else []"},
    killer=BLOCKS + "test_the_next_block_is_gathered_while_one_computes",
)

mutant(
    "zero3_blocks_never_freed",
    "The loss hardly falls: gathered blocks are never freed, so each step computes with the first weights.",
    target="zero.train_zero3.Unit.free",
    changes={"super().free()": ""},
    killer=BLOCKS + "test_the_next_block_is_gathered_while_one_computes",
)

mutant(
    "zero3_last_block_never_freed",
    "Between steps a rank has more than its shards: what the backward ends with stays in memory.",
    target="zero.train_zero3.FullyShardedDataParallel.end_backward",
    changes={"for unit in self.units:": "for unit in self.blocks[0]:"},
    killer=BLOCKS + "test_the_next_block_is_gathered_while_one_computes",
)

mutant(
    "zero_adds_to_the_gradients_of_the_step_before",
    "With model.zero_grad() in the loop gradients grow from step to step: those of shards are not dropped.",
    target="training.shard_guard._refuse_old_gradients",
    changes={"if any(gradient.as_subclass(Tensor).any() for gradient in gradients):": "if False:"},
    killer=WRAPPERS + "test_what_would_train_wrongly_is_refused_in_a_sentence",
    fails_with="DID NOT RAISE",
)

mutant(
    "zero3_trains_what_is_frozen",
    "Weights that a user has frozen are trained: the shard was frozen, and the full parameter was not.",
    target="training.shard_guard._refuse_frozen",
    changes={"if shard.tensor.requires_grad != shard.parameter.requires_grad:": "if False:"},
    killer=WRAPPERS + "test_what_would_train_wrongly_is_refused_in_a_sentence",
    fails_with="DID NOT RAISE",
)

mutant(
    "zero3_last_block_not_sent",
    "The first block learns from the examples of the step before: its gradients miss the end of a step.",
    target="zero.train_zero3.FullyShardedDataParallel.end_backward",
    changes={"self._reduce(self._current)": ""},
    killer=WRAPPERS + "test_two_ranks_train_as_one_process[zero3]",
)

mutant(
    "zero3_gathers_another_ranks_block",
    "A rank computes with the weights of two blocks: ranks run different blocks, and their gathers pair up.",
    target="zero.train_zero3.Unit.start_gather",
    changes={", tensor_id=self.number": ""},
    killer=BLOCKS + "test_ranks_that_run_different_blocks_are_refused_on_all_ranks",
    fails_with="DID NOT RAISE",
)

mutant(
    "zero3_last_microbatch_only",
    "In stage 3 accumulation uses the last microbatch only: its gradients replace the earlier ones.",
    target="zero.train_zero3.FullyShardedDataParallel._wait_for_oldest",
    changes={"work.wait()": "work.wait()\nfor shard in unit.shards:\n    shard.tensor.grad = None"},
    killer=WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[zero3]",
    cause="only the last one used",
)

mutant(
    "zero3_summed",
    "In stage 3 gradients are n times too large: clipping acts in most steps, and SGD steps are too long.",
    target="zero.train_zero3.Unit.reduce_scatter",
    changes={'"mean"': '"sum"'},
    killer=WRAPPERS + "test_two_ranks_train_as_one_process[zero3]",
    cause="sum over ranks that should be a mean",
    symptom="In stage 3 clipping acts in most steps, and SGD steps are too long.",
)

mutant(
    "zero3_gradients_sent_again",
    "In stage 3 the first microbatches weigh most: a gradient that was sent is not cleared.",
    target="zero.shards.FlatParameters.take_gradients",
    changes={"parameter.grad = None": ""},
    killer=WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[zero3]",
)

mutant(
    "zero3_shared_goes_with_the_first_block",
    "A model with tied layers gets nan: the shared weight is freed with the first block.",
    target="zero.sharded_module.divide",
    changes={
        "if p in outside or uses[p] > 1": "if p in outside",
        "uses = Counter(parameter for block in blocks for parameter in block.parameters())": "",
        "own = [[p for p in block.parameters() if p not in root] for block in blocks]": (
            "own, taken = [], set(root)\n"
            "for block in blocks:\n"
            "    own.append([p for p in block.parameters() if p not in taken])\n"
            "    taken.update(own[-1])"
        ),
    },
    killer=WRAPPERS + "test_two_ranks_train_as_one_process[zero3]",
)

mutant(
    "zero_gradient_looks_like_a_full_one",
    "Gradients that a script clips by hand have another scale on each rank: it took the norms of shards.",
    target="training.guard.mark_gradient",
    changes={"parameter.grad.as_subclass(Shard)": "parameter.grad"},
    killer=BLOCKS + "test_the_gradient_of_a_shard_has_no_norm_of_its_own",
    fails_with="DID NOT RAISE",
)

mutant(
    "zero_shards_are_vectors",
    "With ZeRO 3 weights grow without bound: no shard has two dimensions, so groups by p.dim() decay none.",
    target="zero.shards.FlatLayout.parameter_shards",
    changes={"part = part.view([1] * (parameter.dim() - 1) + [-1])": ""},
    killer=WRAPPERS + "test_parameters_may_be_in_groups_with_their_own_options_and_a_scheduler",
)

mutant(
    "zero_clipped_by_the_local_norm",
    "Clipped gradients are too long and change direction: each rank clips by the norm of its own shard.",
    target="training.clipping.clip_grad_norm_",
    changes={'for group in groups:\n    all_reduce(total, "max" if is_max else "sum", group)': ""},
    killer=WRAPPERS + "test_gradients_are_clipped_by_the_norm_of_one_process",
)

mutant(
    "zero_shard_off_by_one",
    "The last number of each shard never changes, because no rank owns it; the losses look normal.",
    target="zero.shards.FlatLayout.split",
    changes={"min(self.mine.stop, offset + size)": "min(self.mine.stop - 1, offset + size)"},
    killer=WRAPPERS + "test_two_ranks_train_as_one_process[zero1]",
    symptom="The last number of each shard never changes, and the losses look normal.",
)
