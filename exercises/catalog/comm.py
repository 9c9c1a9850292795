"""Exercises of lesson 1: messages between ranks, and the collectives that are made of them."""

from exercises.catalog.exercise import Exercise

NARRATED = "tests/comm/test_narrated.py::"
COLLECTIVES = "tests/comm/test_collectives.py::"

EXERCISES = (
    Exercise(
        name="ring_reduce_scatter",
        title="Ring reduce-scatter",
        target="comm.algorithms.ring.reduce_chunks",
        tests=(
            NARRATED + "test_ring_all_reduce_equals_one_process",
            COLLECTIVES + "test_every_reduction_is_right_in_every_dtype[ring]",
        ),
        difficulty=2,
        minutes=25,
        hints=(
            "There are n-1 steps. In each one a rank sends one chunk to the right with `shift`, receives "
            "another one from the left, and adds its own chunk to what has arrived.",
            "Chunk r must end on rank r, and it moves right by one rank in each step. So it starts on rank "
            "r+1: in step 0 rank r sends chunk r-1 and receives chunk r-2, both modulo n.",
            "In step s, rank r sends chunks[(r - 1 - s) % n] and reduces chunks[(r - 2 - s) % n]. Receive "
            "into a new tensor, then call combine(op, arrived, mine, out=mine). After the loop divide chunk "
            "r if the reduction is a mean.",
        ),
    ),
)
