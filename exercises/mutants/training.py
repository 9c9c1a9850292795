"""Wrong implementations of what all lessons share: data, clipping, evaluation and checkpoints."""

from exercises.mutants import mutant

CHECKPOINT = "tests/training/test_checkpoint.py::"
RESUME = "tests/hybrid_parallel/test_state.py::"
PIPELINES = "tests/pipeline_parallel/test_training.py::"
RANDOMNESS = "tests/training/test_run.py::"
EVALUATION = "tests/training/test_evaluation.py::"

mutant(
    "checkpoint_awaited_by_one_rank",
    "A rank that reads the checkpoint sometimes finds the one before: each waits for its own file only.",
    target="training.checkpoint.Checkpoints.wait",
    changes={'on_all("save a checkpoint", self.join)': "self.join()"},
    killer=CHECKPOINT + "test_no_rank_goes_on_before_the_checkpoint_is_on_disk",
)

mutant(
    "checkpoint_complete_before_it_is_written",
    "A checkpoint cannot be loaded: a folder counts as complete before the files of all ranks are on disk.",
    target="training.checkpoint.complete_steps",
    changes={
        'path.parent.name) for path in directory.glob(f"step-*/{MANIFEST}")': (
            'path.name) for path in directory.glob("step-*")'
        ),
    },
    killer=CHECKPOINT + "test_a_checkpoint_becomes_visible_only_when_the_files_of_all_ranks_are_complete",
    symptom="After a disk was full for a moment, the newest checkpoint lacks the file of a rank.",
)

mutant(
    "checkpoint_of_a_later_batch",
    "A resumed run leaves out batches: the data position is that of the moment in which the thread wrote it.",
    target="training.checkpoint.Checkpoints.save",
    changes={"extra = json.loads(json.dumps(extra))": ""},
    killer=CHECKPOINT + "test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change",
    symptom="A resumed run leaves out some batches, and its losses differ from those of a run in one go.",
)

mutant(
    "clipped_by_squares_for_any_norm",
    "With norm_type 1 gradients are clipped too little: squares are added up whatever the norm is.",
    target="training.clipping.clip_grad_norm_",
    changes={"sizes.pow_(norm_type)": "sizes.pow_(2.0)"},
    killer="tests/test_wrappers.py::test_gradients_are_clipped_by_any_norm_as_on_one_process",
)

mutant(
    "targets_counted_that_have_weights",
    "With weights of classes gradients are off by a few percent: targets are counted, and not their weights.",
    target="training.valid_targets.valid_targets",
    changes={"if weight is None else": "if True else"},
    killer="tests/training/test_valid_targets.py::test_weights_of_classes_are_added_up_in_place_of_targets",
)

mutant(
    "checkpoint_of_several_replicas",
    "A checkpoint in the middle of a round is a mixture: some weights are one rank's, others another's.",
    target="training.checkpoint.shared_out",
    changes={"elif len({prints_of_ranks[rank][name] for rank in ranks}) == 1:": "elif True:"},
    killer=CHECKPOINT + "test_shards_of_which_ranks_have_different_values_make_no_checkpoint",
    fails_with="DID NOT RAISE",
)

mutant(
    "checkpoint_of_a_run_that_has_diverged",
    "The last good checkpoint is gone: one whose weights are not finite has replaced it.",
    target="training.checkpoint.Checkpoints._write",
    changes={"refuse_diverged(mine)": ""},
    killer="tests/training/test_run.py::"
    "test_a_checkpoint_that_is_not_finite_is_not_written_and_the_good_one_stays",
)

mutant(
    "checkpoint_of_tensors_that_change",
    "A checkpoint mixes the weights of two steps: a thread reads the tensors that the optimizer changes.",
    target="training.checkpoint.Checkpoints._copied",
    changes={"= copy.copy_(source)": "= source"},
    killer=CHECKPOINT + "test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change",
    symptom="The losses jump after a restart, as if the weights of two steps were mixed.",
)

mutant(
    "checkpoint_of_what_the_rank_does_not_hold",
    "A checkpoint lacks experts: replicas take turns in saving tensors, and hold different experts.",
    target="training.checkpoint.shared_out",
    changes={"min(ranks, key=": "min(range(len(elements)), key="},
    killer=CHECKPOINT + "test_what_only_some_ranks_hold_is_saved_by_one_of_them",
    symptom="A run with divided experts saves checkpoints without an error, and no run can resume from one.",
    fails_with="is damaged",
)

mutant(
    "checkpoint_state_of_the_first_shard",
    (
        "After a resume the loss jumps: each rank's optimizer state was saved as that of a "
        "parameter's first shard."
    ),
    target="training.state_shards.trained_shards",
    changes={"trained, **where, optimizer=": 'trained, where.get("shape"), optimizer='},
    killer=CHECKPOINT + "test_the_state_of_an_optimizer_lies_where_its_parameter_does",
    fails_with="and a checkpoint has one",
)

mutant(
    "checkpoint_of_the_largest_step_is_the_newest",
    "After a training has gone back to an earlier step, each new checkpoint removes the one before it.",
    target="training.checkpoint.complete_steps",
    changes={'key=lambda step: (number_of(directory / f"step-{step}"), step)': "key=int"},
    killer=CHECKPOINT
    + "test_the_newest_are_those_that_were_completed_last_and_a_stray_folder_is_no_checkpoint",
)

mutant(
    "checkpoint_without_the_learning_rate",
    "After a resume the loss jumps: the learning rate is the first one again, and not that of the schedule.",
    target="training.state_shards.tensors_to_load",
    changes={"in options.items()": "in options.items() if key in ()"},
    killer=CHECKPOINT
    + "test_an_optimizer_goes_on_with_the_same_bits_at_the_rate_that_its_schedule_had_reached",
)

mutant(
    "resumes_with_the_first_batches",
    "A resumed run has another loss than an undisturbed one: it trains on the first batches again.",
    target="training.resuming.Resuming._load",
    changes={"return step": "return 0"},
    killer=RESUME + "test_a_resumed_run_on_another_mesh_goes_on_where_the_first_one_was",
)

mutant(
    "pipeline_evaluation_mode_stays",
    "After the first evaluation training continues without dropout, and the model overfits.",
    target="training.evaluation.evaluating",
    changes={
        (
            "modes = {module: module.training for module in model.modules()}\n"
            "model.eval()\n"
            "try:\n"
            "    with torch.no_grad():\n"
            "        yield\n"
            "finally:\n"
            "    for module, is_training in modes.items():\n"
            "        module.training = is_training"
        ): "model.eval()\nwith torch.no_grad():\n    yield",
    },
    killer=PIPELINES + "test_training_goes_on_with_dropout_after_an_evaluation",
)

mutant(
    "ranks_drop_out_the_same",
    "Dropout regularises less on more ranks: all have the same seed, so their examples share one mask.",
    target="training.data.seed_step",
    changes={"(seed, step, stream)": "(seed, step)"},
    killer=RANDOMNESS + "test_ranks_with_examples_of_their_own_draw_different_masks",
)

mutant(
    "validated_on_one_ranks_slice",
    "The validation loss falls as ranks are added: rank 0 divides the sum over its own slice by all tokens.",
    target="training.evaluation.held_out_means",
    changes={"all_reduce(total, pattern=pattern)": ""},
    killer=EVALUATION + "test_all_ranks_report_the_means_over_the_examples_of_all_ranks",
)

mutant(
    "validated_on_what_was_trained_on",
    "The validation loss falls as the training loss does, however much the model overfits.",
    target="training.data.TrainingData.held_out",
    changes={"self._held_out_corpus": "self._corpus"},
    killer=EVALUATION + "test_what_is_validated_is_not_trained_on_and_not_dropped_out",
)

VALID_TARGETS = "tests/training/test_valid_targets.py::"

mutant(
    "targets_counted_by_each_rank",
    "Gradients are not those of one process if prompts are ignored: each rank divides by its own targets.",
    target="training.valid_targets.valid_targets",
    changes={'all_reduce(number, op="mean", group=group, pattern=pattern)': ""},
    killer=VALID_TARGETS + "test_ranks_with_few_targets_count_as_much_as_those_targets",
    symptom="With --ignore-first the gradients on two ranks are not those of one process; without, they are.",
)

mutant(
    "targets_that_microbatches_do_not_have",
    "A microbatch with few valid targets counts as much as a full one: the mean of the microbatches' means.",
    target="pipeline_parallel.own_stages.OwnStages.begin_step",
    changes={"count / self.num_targets for count in counts": "1 / len(counts) for count in counts"},
    killer=VALID_TARGETS + "test_microbatches_with_few_targets_count_as_much_as_those_targets",
    symptom="With --ignore-first a pipeline's gradients change with the number of microbatches.",
)

mutant(
    "targets_that_are_ignored_count",
    "With a prompt that is not trained on the loss of a sequence is too small: it is divided by all tokens.",
    target="context_parallel.parallel_model.ContextParallel.loss",
    changes={"count_valid(targets_bt)": "targets_bt.numel()"},
    killer=VALID_TARGETS + "test_gradients_of_sequences_that_are_cut_are_those_of_one_process",
    symptom="With --ignore-first the loss of a sequence is too small, the more so the longer the prompt is.",
)
