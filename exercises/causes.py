"""Say in words what has probably caused a failure, from what the test got and expected on each rank.

Each rule looks at the evidence and returns a sentence or None, and the first sentence counts. No rule knows
the name of an exercise or a mutant: what it may use is in `Evidence`.
"""

import re
from collections.abc import Callable

from exercises.causes_in_lessons import IN_LESSONS, ON_A_MESH, mixed_up_microbatches
from exercises.causes_of_lists import OF_LISTS
from exercises.causes_of_numbers import norm, overflow, part, powers, rounded, scale, shown_names, zeros
from exercises.evidence import Evidence
from exercises.hangs import hang, no_such_rank, unmoved
from exercises.relations import belongs_to
from exercises.topics import MESSAGES, PLAIN_TOPICS, SENTENCE_TOPICS, TOPICS

_A_GRADIENT = re.compile(r"(?:model\.)?(?:module\.)?(.+)\.grad is not None")
_NO_ERROR = re.compile(r"DID NOT RAISE (?:any of \()?([A-Z]\w*)")


def likely_cause(evidence: Evidence) -> str | None:
    """Return a sentence that names the likely cause, or None where the evidence says too little."""
    return next((cause for rule in RULES if (cause := rule(evidence))), None)


def message(e: Evidence) -> str | None:
    """Point to what the message of a failed assertion says."""
    return next((cause for words, cause in MESSAGES if re.search(words, e.message)), None)


def mismatch(e: Evidence) -> str | None:
    if "The ranks do not fit together" not in e.text:
        return None
    if "same order" in e.text:
        return (
            "The ranks call different collectives, or the same ones in different orders: does a rank decide "
            "by what only that rank has seen?"
        )
    return (
        "The ranks pass tensors of different sizes to the same collective, so they call it for different "
        "things or in different orders: all ranks must agree on one order."
    )


def not_refused(e: Evidence) -> str | None:
    if not (found := _NO_ERROR.search(e.text)):
        return None
    return (
        f"A wrong use goes on without an error: the check that must refuse it with {found[1]} is missing, "
        "or does not run on every rank."
    )


def initial(e: Evidence) -> str | None:
    """Find out whether ranks have started differently: then what is never trained differs too."""
    if not e.first or "parameter" not in e.first.what or not e.compared.keys() - {0}:
        return None
    if 0 not in e.compared and ("initial" in e.first.what or any("frozen" in name for name in e.wrong)):
        return (
            "Only rank 0 is right, and what is never trained differs too: the other ranks have not started "
            "from rank 0's values. Is a broadcast missing?"
        )
    if "initial" in e.first.what:
        return "The copies differ before the first step: does a rank start from values of its own?"
    return None


def none_expected(e: Evidence) -> str | None:
    if "zeros for none" in e.kinds:
        return (
            "Zeros stand where no gradient should be: an optimizer with weight decay or momentum would move "
            "a parameter that was not used. Leave its gradient None."
        )
    if "extra" in e.kinds:
        return "There is a gradient where none should be: is one of an earlier step kept and not cleared?"
    if e.first and e.first.is_plain and e.first.operator == "is not" and e.first.pairs[""] == (None, None):
        if not (found := _A_GRADIENT.fullmatch(e.first.what)):
            return "There is no value: is it not computed on every rank?"
        return (
            f"This rank has no gradient of `{found[1]}`. If another rank has one, this rank must contribute "
            "zeros and get the mean."
        )
    if "missing" in e.kinds:
        names = shown_names(n for n, one in e.wrong.items() if one.kind == "missing")
        if names == "``":  # what is None has no name, so it need not be a gradient
            return "There is None where a value is due: is it set, and returned, in each case?"
        return f"No gradient arrives at {names}: is it not computed, or lost before it is written?"
    return None


def order(e: Evidence) -> str | None:
    swapped = [(n, o) for one in e.compared.values() for n, o in belongs_to(one).items()]
    if swapped:
        name, other = swapped[0]
        return f"`{name}` has what belongs to `{other}`: the order of the two is confused on the way."
    if "order" in e.kinds and e.mentions("sampler", "shuffle", "epoch"):
        return (
            "These are the right examples in the wrong order: does the shuffle depend on the seed and on the "
            "epoch, and on nothing else?"
        )
    if "order" in e.kinds:
        of_topic = plain_topic(e) if e.first and e.first.is_plain else None
        return of_topic or (
            "The numbers are right and in the wrong order: is each part written to the place of its rank?"
        )
    return None


def topic(e: Evidence) -> str | None:
    """Point to what the failed test is about, where the numbers alone say little."""
    if not e.first or e.first.is_plain or (e.kinds <= {"factor", "zero"} and "loss" not in e.wrong):
        return None
    return next((cause for words, cause in TOPICS if e.mentions(*words)), None)


def plain_topic(e: Evidence) -> str | None:
    """Point to what the failed test is about, where it asserts something else than tensors."""
    is_plain = e.first.is_plain if e.first else "assert" in e.text.lower()
    topics = () if e.lesson == "lab" else PLAIN_TOPICS  # the tests of lab are not about techniques
    topics += () if e.kinds else SENTENCE_TOPICS
    return next((cause for words, cause in topics if is_plain and e.mentions(*words)), None)


def ranks_differ(e: Evidence) -> str | None:
    """Say whether the ranks agree with one another, which shows on which side of a reduction to look."""
    across = e.across()
    if across == "differ" and e.first and e.first.what.startswith("gradient"):
        return (
            "The gradients differ between the ranks, so a part of them is not averaged over the ranks: does "
            "the average begin before all of them are there, or is something added on a rank afterwards?"
        )
    if across == "differ":
        return (
            "The ranks end with different values: look at what each of them gets, and from whom. Is what "
            "arrives written into the tensors that were passed in? `parts[k] = x` only replaces an entry of "
            "a list."
        )
    if across == "agree":
        return (
            "All ranks have the same wrong values. If they are reduced, look at what each rank puts in, "
            "before the ranks communicate. If they are only passed on, does each rank begin with its own "
            "part, and does each part arrive where it belongs?"
        )
    return None


def step(e: Evidence) -> str | None:
    """Find out whether an earlier step was right: the tests compare steps one after another."""
    if e.first and (found := re.search(r"step ([1-9]\d*)", e.first.what)) and e.across() != "mean":
        return (
            f"Step {int(found[1]) - 1} was right and step {found[1]} is wrong: what the optimizer has "
            "updated is not what the ranks compute with. Are new parameters gathered, and old copies freed?"
        )
    return None


def not_reduced(e: Evidence) -> str | None:
    """Find out whether the ranks have values of their own, which together would be right."""
    across = e.across()
    if across == "mean":
        return (
            "Each rank has its own values, and their mean would be right: they are not averaged over the "
            "ranks, or the average is not what is used in the end."
        )
    if across == "sum":
        return (
            "Each rank has its own part, and their sum would be right: the parts are not added up over the "
            "ranks. Is an all-reduce missing?"
        )
    if across == "groups":
        return (
            "Some ranks agree with one another and not with the others: values never pass from one group of "
            "ranks to the other. Is a round missing? Does each round reach another partner?"
        )
    return None


def count(e: Evidence) -> str | None:
    """Compare two numbers of a plain assertion, such as the microbatches that a rank holds."""
    if not e.first or not e.first.is_plain or e.first.operator not in ("==", "<="):
        return None  # what must be less than a limit may be a size or a time
    got, expected = e.first.pairs[""]
    if isinstance(got, list) and isinstance(expected, list) and len(got) < len(expected):
        return f"There are {len(got)} of {len(expected)}: is something left out?"
    if isinstance(got, int) and isinstance(expected, int) and not isinstance(got, bool):
        if got > expected:
            allowed = f"and not {expected}" if e.first.operator == "==" else f"and at most {expected} may be"
            return f"There are {got} {allowed}: is something kept, sent or counted too often?"
        return f"There are {got} and not {expected}: is something left out, or the same again?"
    return None


RULES: tuple[Callable[[Evidence], str | None], ...] = (
    no_such_rank,
    unmoved,
    hang,
    not_refused,
    message,
    mismatch,
    initial,
    none_expected,
    norm,
    overflow,
    *OF_LISTS,
    count,
    mixed_up_microbatches,
    *ON_A_MESH,
    order,
    not_reduced,
    scale,
    zeros,
    topic,
    plain_topic,
    step,
    powers,
    rounded,
    *IN_LESSONS,
    ranks_differ,
    part,
)
