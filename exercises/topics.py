"""List what to look at by what a failed test is about, for failures whose numbers alone say little.

An entry has words that a test's name may contain, and a sentence. The first entry counts.
"""

MASKS = (
    ("drops out", "dropout", "masks"),
    "Random numbers are drawn here: which ranks and which passes must draw the same mask, and which not?",
)

DROPPED = (
    ("dropped", "exception", "gan learns"),
    "A backward that was given up, or a zero_grad(), must leave nothing behind: are its gradients still "
    "added, or still on their way?",
)

TOPICS = (
    (
        ("another order", "different orders"),
        "One rank computes its gradients in another order than the others: do all ranks communicate in one "
        "order on which they have agreed?",
    ),
    DROPPED,
    (
        ("microbatch", "accumulated"),
        "Gradients of several microbatches must add up: is only the last one used, or is an earlier one "
        "cleared, overwritten or counted again?",
    ),
    MASKS,
    (
        ("tied",),
        "Two ranks hold a copy of a tied weight: both copies must get the sum of both gradients, once.",
    ),
)

# For assertions about something else than tensors.
PLAIN_TOPICS = (
    DROPPED,
    (
        ("hides", "hidden", "while one computes", "is sent while"),
        "Communication and computing should overlap here: does something wait before the computing goes on, "
        "or does it start too late?",
    ),
    (
        ("examples of all ranks", "repeated images", "counts each example"),
        "An evaluation counts each example of all ranks once: is it one rank's part only, or do some "
        "examples count twice?",
    ),
    (
        ("on all ranks or on none",),
        "All ranks must decide the same: does a rank decide by what only that rank has seen?",
    ),
    MASKS,
)

# For assertions about sentences.
SENTENCE_TOPICS = (
    (
        ("all ranks", "every rank", "all survivors", "reaches the ranks"),
        "Every rank must say the same: does only the rank that notices something raise the error, while the "
        "others go on or name something else?",
    ),
)
