"""List what to look at by what a failed test is about, for failures whose numbers alone say little.

An entry has words that a test's name may contain, and a sentence. The first entry counts.
"""

from exercises.topics_of_transports import OF_TRANSPORTS

MASKS = (
    ("drops out", "dropout", "masks"),
    "Random numbers are drawn here: which ranks and which passes must draw the same mask, and which not?",
)

DROPPED = (
    ("dropped", "exception", "gan learns"),
    "A backward that was given up, or a zero_grad(), must leave nothing behind: are its gradients still "
    "added, or still on their way?",
)

OF_EXPERTS = (
    (
        ("auxiliary loss",),
        "The balancing loss multiplies a rank's own probabilities by the share of tokens that chose an "
        "expert in the whole batch: are the counts those of all ranks?",
    ),
    (
        ("with its residual",),
        "A token that no expert takes leaves a block as attention has left it: does its residual reach the "
        "output?",
    ),
    (
        ("come home in order",),
        "What experts return must be added to the token that it was made of: which row is that, for each of "
        "the experts that a token has chosen?",
    ),
    (
        ("replicas only",),
        "Gradients of an expert are averaged over its copies, and those of other experts must not mix with "
        "them: which ranks hold the same one?",
    ),
)

TOPICS = (
    *OF_EXPERTS,
    (
        ("two deaths",),
        "After a death fewer ranks share the batch: does every number follow that depends on how many they "
        "are, such as the divisor of a mean?",
    ),
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
        ("have written", "have arrived"),
        "Ranks use the same memory here: does a rank wait until the others have finished with it, before it "
        "reads what they write, and before it goes on?",
    ),
    (
        ("hides", "while one computes", "is sent while"),
        "Communication and computing should overlap here: does something wait before the computing goes on, "
        "or does it start too late?",
    ),
    (
        ("examples of all ranks", "repeated images", "counts each example"),
        "An evaluation counts each example of all ranks once: is it one rank's part only, or do some "
        "examples count twice?",
    ),
    (
        ("not trained on", "held out"),
        "A validation needs data that training never sees: are its examples also trained on?",
    ),
    (
        ("resumed",),
        "A resumed run must go on as if it had not stopped: is all saved and loaded that decides what is "
        "computed and in which order, also what was observed while training, such as the order of "
        "gradients?",
    ),
    (
        ("no later change",),
        "A save that goes on in the background must write what there was when it began: is all of it copied "
        "before the call returns, the tensors and also where the run is in its data?",
    ),
    (
        ("becomes visible",),
        "An incomplete checkpoint looks complete: does it get its final name before the last of its files is "
        "on disk, on every rank?",
    ),
    (
        ("takes it once",),
        "No rank may take a step twice, or miss one: do a rank's state and its count of steps change "
        "together, also when it takes over another's?",
    ),
    (
        ("after an evaluation",),
        "An evaluation must leave the model as it was: is it in training mode again?",
    ),
    (
        ("on all ranks or on none",),
        "All ranks must decide the same: does a rank decide by what only that rank has seen?",
    ),
    MASKS,
    (
        ("does not change",),
        "What must stay as it is has changed: is a tensor of the caller written to, where a copy is needed?",
    ),
    (
        ("one tensor group", "one group of an axis"),
        "Which ranks form a group follows from how they are numbered: which coordinate changes from one rank "
        "to the next, and which one changes least often?",
    ),
    (
        ("plans come in order", "equally fast plans"),
        "Plans are sorted by several things: does a plan that does not fit come after all that fit, and what "
        "decides between equal ones?",
    ),
    (
        ("recomputation adds",),
        "Recomputation saves memory and costs a second forward: is that time in the formula?",
    ),
)

# For assertions about sentences.
SENTENCE_TOPICS = (
    (
        ("all ranks", "every rank", "all survivors", "reaches the ranks"),
        "Every rank must say the same: does only the rank that notices something raise the error, while the "
        "others go on or name something else?",
    ),
)

# By what the message of an assertion or of an error says, as a regular expression.
MESSAGES = (
    *OF_TRANSPORTS,
    (
        r"not the same on all ranks: \['', ",
        "No rank raises an error: is something left out of what the ranks compare?",
    ),
    ("not the same on all ranks: ", SENTENCE_TOPICS[0][1]),
    (
        "Another backward began before",
        "Gradients count as complete while others are still added to them: what comes later, such as that of "
        "another microbatch, is not averaged over the ranks.",
    ),
    (
        "not here in the forward",
        "A parameter is not there when the forward needs it: is its block gathered before its forward, and "
        "what several blocks share in each of them, also after one of them was freed?",
    ),
    (
        "not here in the backward",
        "A parameter is not there when the backward needs it: its block was freed after the forward, and "
        "must be gathered again before the backward.",
    ),
    (
        "overlap, or leave something out",
        "Each number must be in one shard: does each shard begin where the one before it ends, and is its "
        "last number part of it?",
    ),
    (
        "count for another axis",
        "A message belongs to the axis along which it travels: does each group have its own axis's name?",
    ),
    (
        "sends .* by the formulas",
        "The formulas and the counted bytes of an axis differ: is what this rank itself sends expected, with "
        "its own stages, microbatches and groups, and nothing of another rank?",
    ),
    (
        "is saved by no rank",
        "A checkpoint needs each element of the model once: is it saved by a rank that holds it, also what "
        "only some ranks hold, such as an expert?",
    ),
    (
        "still held",
        "Something is needed no longer and still referred to: does a computed gradient keep its graph, or a "
        "list or dict its entry?",
    ),
)
