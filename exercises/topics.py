"""List what to look at by what a failed test is about, for failures whose numbers alone say little.

An entry has words that a test's name may contain, and a sentence. The first entry counts.
"""

TOPICS = (
    (
        ("another order", "different orders"),
        "One rank computes its gradients in another order than the others: do all ranks communicate in one "
        "order on which they have agreed?",
    ),
    (
        ("dropped", "exception", "gan learns"),
        "A backward that was given up, or a zero_grad(), must leave nothing behind: are its gradients still "
        "added, or still on their way?",
    ),
    (
        ("microbatch", "accumulated"),
        "Gradients of several microbatches must add up: is only the last one used, or is an earlier one "
        "cleared, overwritten or counted again?",
    ),
    (
        ("drops out", "dropout", "masks"),
        "Random numbers are drawn here: which ranks and which passes must draw the same mask, and which not?",
    ),
    (
        ("tied",),
        "Two ranks hold a copy of a tied weight: both copies must get the sum of both gradients, once.",
    ),
)
