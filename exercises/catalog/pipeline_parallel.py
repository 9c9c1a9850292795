"""Exercises of lesson 4: layers are divided into stages, and a schedule says who does what, and when."""

from exercises.catalog.exercise import Exercise

SCHEDULES = "tests/pipeline_parallel/test_schedules.py::"
ONE_STAGE = SCHEDULES + "test_schedules_with_one_stage_a_rank_are_valid_and_hold_what_they_say"

EXERCISES = (
    Exercise(
        name="pipeline_gpipe",
        title="The table of GPipe",
        target="pipeline_parallel.schedules.gpipe",
        tests=(
            SCHEDULES + "test_gpipe_does_all_forwards_and_then_all_backwards_in_the_same_order",
            ONE_STAGE,
        ),
        difficulty=1,
        minutes=15,
        hints=(
            "A table has one row for each stage. `row = _Row()` begins one, row.add('F', stage) adds the "
            "next forward, row.add('B', stage) the next backward, and row.actions is the finished list.",
            "The order on a rank says nothing about when an action starts. All rows of GPipe have the same "
            "actions but for the stage.",
            "Check the arguments first, as `naive` does: _check(stages=stages, microbatches=microbatches).",
        ),
    ),
    Exercise(
        name="pipeline_1f1b",
        title="The table of 1F1B",
        target="pipeline_parallel.schedules.one_f_one_b",
        tests=(
            SCHEDULES + "test_1f1b_warms_up_less_on_each_further_rank",
            ONE_STAGE,
            "tests/pipeline_parallel/test_narrated.py::test_one_f_one_b_equals_one_process",
        ),
        difficulty=2,
        minutes=30,
        needs=("pipeline_gpipe",),
        hints=(
            "A row has three phases: forwards only; a forward and a backward in turn; backwards only. How "
            "many forwards does the last rank need before its first backward?",
            "Rank r begins with p-1-r forwards, and ends with as many backwards. In between, each forward is "
            "followed by a backward: row.add('FB', stage).",
            "There may be fewer microbatches than p-1-r, so the warmup is the smaller of the two numbers. "
            "The steady state has the microbatches that are left.",
        ),
    ),
    Exercise(
        name="pipeline_zb_h1",
        title="The table of ZB-H1",
        target="pipeline_parallel.schedules.zb_h1",
        tests=(
            SCHEDULES + "test_zb_h1_puts_off_the_weight_gradients_by_as_many_backwards_as_the_ranks_number",
            SCHEDULES + "test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank",
            ONE_STAGE,
        ),
        difficulty=3,
        minutes=35,
        needs=("pipeline_1f1b",),
        hints=(
            "Begin with 1F1B, and write I for each backward. What is left is to place one W for each "
            "microbatch.",
            "Rank r puts each W off by r backwards: its first r backwards are I alone, and each later one is "
            "I and then the W that is due.",
            "Number the backwards through the steady state and the cooldown: the actions are 'IW' if the "
            "number is at least r, else 'I'. At the end add the min(m, r) W that are still missing.",
        ),
    ),
)
