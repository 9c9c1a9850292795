"""Exercises of lesson 2, second part: ZeRO divides optimizer state, gradients and parameters."""

from exercises.catalog.exercise import Exercise

ONE_PROCESS = "tests/zero/test_narrated.py::"
KILLERS = "tests/zero/test_equality.py::"
MEMORY = "tests/zero/test_memory.py::"

EXERCISES = (
    Exercise(
        name="memory_formulas",
        title="The memory of each stage",
        notebook="06_zero_and_fsdp",
        target="zero.memory.formula",
        also=("zero.memory.of_one_process", "zero.memory.owned"),
        tests=(
            MEMORY + "test_the_formula_gives_the_gigabytes_of_the_papers_figure_1",
            MEMORY + "test_shards_add_up_to_the_formula_and_padding_makes_them_equal",
        ),
        difficulty=1,
        minutes=20,
        doc="""
            Return what one of `ranks` ranks holds by formula, if one process holds `full`.

            Held has three fields, in bytes: `parameters`, `gradients` and `optimizer_state`. Stage 0 is
            plain data parallel. Stage 1 divides the optimizer's state among the ranks, stage 2 also the
            gradients, and stage 3 also the parameters. The quotients may be fractions.
        """,
        docs={
            "of_one_process": """
                Return the bytes that one process holds.

                Each share describes some parameters: `full` is how many numbers they have, `itemsize` the
                bytes of one, and `trained` tells whether they have gradients. The optimizer keeps `states`
                numbers for each number of a trained parameter, of the same itemsize.
            """,
            "owned": """
                Return what this rank should hold, to the byte, without padding.

                Of each share this rank owns `mine` numbers. What a stage does not divide, every rank holds
                in full.
            """,
        },
        hints=(
            "Each stage divides one kind of tensor more. Which stages divide the gradients: only 2, or 2 "
            "and 3?",
            "Frozen parameters have neither gradients nor optimizer state, but they take memory. Add up the "
            "bytes of all shares for the parameters, and those of trained shares for the rest.",
            "owned is formula with the numbers that this rank really owns in place of an n-th: add up "
            "share.mine * share.itemsize. The optimizer's state is `states` times the bytes of the trained "
            "numbers.",
        ),
    ),
    Exercise(
        name="zero_shards",
        title="A rank's shard of each parameter",
        notebook="06_zero_and_fsdp",
        target="zero.shards.FlatLayout.split",
        tests=(
            ONE_PROCESS + "test_zero1_equals_one_process",
            KILLERS + "test_every_number_of_every_parameter_is_in_one_ranks_shard",
            KILLERS + "test_a_parameter_may_have_fewer_numbers_than_there_are_ranks",
        ),
        difficulty=3,
        minutes=30,
        needs=("memory_formulas",),
        doc="""
            Return for each parameter at which element this rank's shard of it starts, and a view of it.

            The parameters stand one after the other in a flat tensor, of which `shard` is this rank's part.
            If a parameter is not in this rank's part, the view is empty, and starts at 0.
        """,
        helps=(
            "self.sizes: list[int]\n    How many numbers each parameter has.",
            "self.mine: slice\n    Where this rank's part is in the flat tensor.",
        ),
        hints=(
            "A rank's shard of a parameter is where two ranges of the flat tensor overlap: that of the "
            "parameter, from its offset to offset + size, and from self.mine.start to self.mine.stop.",
            "Two ranges overlap from the larger of the two beginnings to the smaller of the two ends. If "
            "that end is not after that beginning, the view is empty: shard[:0].",
            "With begin and end in the flat tensor, the view is shard[begin - self.mine.start : end - "
            "self.mine.start], and it starts at element begin - offset of its parameter. Then add the size "
            "to the offset.",
        ),
    ),
)
