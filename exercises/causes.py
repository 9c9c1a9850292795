"""Say in words what has probably caused a failure, from what the test got and expected on each rank.

Each rule looks at the evidence and returns a sentence or None, and the first sentence counts. No rule knows
the name of an exercise or a mutant: what it may use is in `Evidence`.
"""

import re
from collections.abc import Callable, Iterable

from exercises.evidence import Evidence
from exercises.hangs import hang
from exercises.relations import belongs_to
from exercises.topics import PLAIN_TOPICS, SENTENCE_TOPICS, TOPICS

_A_GRADIENT = re.compile(r"(?:model\.)?(?:module\.)?(.+)\.grad is not None")
_NO_ERROR = re.compile(r"DID NOT RAISE (?:any of \()?(\w+)")


def likely_cause(evidence: Evidence) -> str | None:
    """Return a sentence that names the likely cause, or None where the evidence says too little."""
    return next((cause for rule in RULES if (cause := rule(evidence))), None)


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
        names = _shown(n for n, one in e.wrong.items() if one.kind == "missing")
        return f"No gradient arrives at {names}: is it not computed, or lost before it is written?"
    return None


def norm(e: Evidence) -> str | None:
    one = e.wrong.get("norm")
    if one is None or not one.factor:
        return None
    if one.factor < 1:
        return (
            "The norm is too small: it is that of one rank's part. Add up the squares over all ranks before "
            "the root."
        )
    return "The norm is too large: what several ranks have a copy of is counted on each. Count it once."


def overflow(e: Evidence) -> str | None:
    if "overflow" in e.kinds:
        return (
            "The sum does not fit into this dtype, so it overflows to inf: divide before adding up, or add "
            "up in a wider dtype."
        )
    if "real" in e.kinds:
        return "The imaginary parts are lost: is a complex tensor converted to real numbers?"
    return None


def order(e: Evidence) -> str | None:
    swapped = [(n, o) for one in e.compared.values() for n, o in belongs_to(one).items()]
    if swapped:
        name, other = swapped[0]
        return f"`{name}` has what belongs to `{other}`: the order of the two is confused on the way."
    if "order" in e.kinds:
        return "The numbers are right and in the wrong order: is each part written to the place of its rank?"
    return None


def topic(e: Evidence) -> str | None:
    """Point to what the failed test is about, where the numbers alone say little."""
    if not e.first or e.first.is_plain or (e.kinds <= {"factor", "zero"} and "loss" not in e.wrong):
        return None
    return next((cause for words, cause in TOPICS if e.mentions(*words)), None)


def plain_topic(e: Evidence) -> str | None:
    """Point to what the failed test is about, where it asserts something else than tensors."""
    is_plain = e.first.is_plain if e.first else "assert" in e.text.lower()
    topics = PLAIN_TOPICS if e.kinds else PLAIN_TOPICS + SENTENCE_TOPICS
    return next((cause for words, cause in topics if is_plain and e.mentions(*words)), None)


def ranks_differ(e: Evidence) -> str | None:
    """Say whether the ranks agree with one another, which shows on which side of a reduction to look."""
    across = e.across()
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
            "ranks to the other. Does each round reach another partner?"
        )
    return None


def scale(e: Evidence) -> str | None:
    factors = {round(one.factor, 4) for one in e.wrong.values()}
    if not e.kinds <= {"factor", "part factor"} or len(factors) != 1 or _counts_things(e):
        return None
    factor, n = factors.pop(), e.ranks or 0
    if n > 1 and _close(factor, n):
        return f"There are {n} ranks: {_as_often_as_ranks(e)}."
    if n > 1 and _close(factor, 1 / n):
        return (
            f"There are {n} ranks: it is divided by their number once too often, or one rank's part is taken "
            "for all."
        )
    if n > 1 and _close(factor, n * n):
        return f"That is {n} times {n}, with {n} ranks: it is added up over the ranks twice."
    if 1.5 < factor < 10 and _close(factor, round(factor)):
        return (
            f"It is added up {round(factor)} times where a mean is due, or once too often for each "
            "microbatch or part."
        )
    if 0 < factor < 0.7 and _close(1 / factor, round(1 / factor)):
        parts = round(1 / factor)
        return f"It is divided by {parts} once too often, or only one of {parts} parts is used."
    return "The sign is wrong." if _close(factor, -1) else None


def _as_often_as_ranks(e: Evidence) -> str:
    """Say what makes a value n times too large on n ranks: a gradient may also be that of the only user."""
    summed = "it is a sum over ranks that should be a mean"
    if e.first is None or not any("grad" in text for text in (e.first.what, *e.wrong)):
        return f"something that only one rank should add is added by each, {summed}, or it is added up twice"
    if e.across() == "agree":
        return f"{summed}, or it is added up twice"
    return (
        f"{summed}, or it is added up twice, or it is not averaged at all: then this is one rank's own "
        "value, and the other ranks have zeros or nothing"
    )


def zeros(e: Evidence) -> str | None:
    is_formula = e.first is not None and e.first.is_plain and e.first.world_size is None
    if "zero" in e.kinds and not is_formula:
        names = _shown(name for name, one in e.wrong.items() if one.kind == "zero")
        where = "" if names == "``" else f" at {names}"
        return f"Only zeros arrive{where}: are they cleared too early, or never written?"
    return None


def powers(e: Evidence) -> str | None:
    if "factors" in e.kinds:
        return "Parts have different factors: is each round or hop adding or dividing once more?"
    return None


def part(e: Evidence) -> str | None:
    if "part" not in e.kinds:
        return None
    name, one = next((name, one) for name, one in e.wrong.items() if one.kind == "part")
    where = f"`{name}` is " if name else "The result is "
    return f"{where}{one.text}: is one part left out, sent to the wrong rank or written to the wrong place?"


def rounded(e: Evidence) -> str | None:
    if "rounded" in e.kinds:
        return "It is right but for rounding: is something computed or sent in a smaller dtype?"
    return None


def count(e: Evidence) -> str | None:
    """Compare two numbers of a plain assertion, such as the microbatches that a rank holds."""
    if not e.first or not e.first.is_plain or e.first.operator not in ("==", "<=", "<"):
        return None
    got, expected = e.first.pairs[""]
    if isinstance(got, list) and isinstance(expected, list) and len(got) < len(expected):
        return f"There are {len(got)} of {len(expected)}: is something left out?"
    if isinstance(got, int) and isinstance(expected, int) and not isinstance(got, bool):
        if got > expected:
            return f"There are {got} and not {expected}: is something kept, sent or counted too often?"
        return f"There are {got} and not {expected}: is something left out, or the same again?"
    return None


RULES: tuple[Callable[[Evidence], str | None], ...] = (
    hang,
    mismatch,
    not_refused,
    initial,
    none_expected,
    norm,
    overflow,
    count,
    order,
    not_reduced,
    scale,
    zeros,
    topic,
    plain_topic,
    step,
    powers,
    rounded,
    ranks_differ,
    part,
)


def _counts_things(e: Evidence) -> bool:
    """Return whether a plain assertion compares integers, which are not sums over ranks."""
    if not e.first or not e.first.is_plain:
        return False
    values = [v for side in e.first.pairs[""] for v in (side if isinstance(side, list) else [side])]
    return all(isinstance(value, int) for value in values)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * abs(b)


def _shown(names: Iterable[str]) -> str:
    first, *others = (f"`{name}`" for name in names)
    return f"{first} and {len(others)} more" if others else first
