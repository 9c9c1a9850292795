"""Name the likely cause of a failure by one table: how what the ranks got is related to what is right.

    what each rank has, of n              the likely cause
    n, n * n or 1/n times the value       a sum for a mean, a sum twice, a mean twice
    its own value; their mean is right    never reduced, or the reduced value is not used
    its own part; their sum is right      never added up
    k times, or 1/k of the value          microbatches or parts: one counted again, or all but one lost
    the right numbers elsewhere           written in the order of arrival, or to another's place
    wrong from one element on             a shard that begins at another shard's place
    nothing, because it waits             a cycle of ranks that wait for one another

The rows of TABLE are tried in turn, and the first that fits is named. No row knows an exercise or a mutant.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from exercises.checker.compared import Compared
from exercises.checker.relations import Relation, across_ranks, belongs_to, wrong_elements, wrong_values
from lab.ranks.waiting import Wait, chain

_WAITED = re.compile(r"rank (\d+) could not (send to|receive from) rank (\d+): it waited until the timeout")
_NO_ERROR = re.compile(r"DID NOT RAISE (?:any of \()?([A-Z]\w*)")


@dataclass(frozen=True)
class Evidence:
    """Hold what is known of a failed test: its name in words, the error, and what each rank compared."""

    test: str
    text: str
    compared: Mapping[int | None, Compared] = field(default_factory=dict)
    waits: Mapping[int, Wait] = field(default_factory=dict)

    @cached_property
    def first(self) -> Compared | None:
        return next(iter(self.compared.values()), None)

    @property
    def is_plain(self) -> bool:
        """Tell whether the failed assertion compares something else than named tensors."""
        return self.first is None or self.first.is_plain

    @cached_property
    def wrong(self) -> dict[str, Relation]:
        """The values that are wrong on any rank."""
        found: dict[str, Relation] = {}
        for one in self.compared.values():
            found = wrong_values(one) | found
        return found

    @cached_property
    def kinds(self) -> set[str]:
        return {one.kind for one in self.wrong.values()}

    @cached_property
    def ranks(self) -> int:
        return (self.first.world_size if self.first else None) or 0

    @cached_property
    def factor(self) -> float | None:
        """The factor of all wrong values, if there is one and they are no numbers of things."""
        factors = {round(one.factor, 4) for one in self.wrong.values()}
        is_count = self.first is not None and self.first.is_plain and isinstance(self.first.pairs[""][0], int)
        return (
            factors.pop()
            if self.kinds <= {"factor", "part factor"} and len(factors) == 1 and not is_count
            else None
        )

    @cached_property
    def across(self) -> str | None:
        """How the ranks' values are related, if that is the same for all whose relation is clear."""
        found = {across_ranks(self.compared, name) for name in self.wrong} - {None}
        clear = found - {"differ", "agree"}
        return next(iter(clear or found)) if len(clear or found) == 1 else None

    def who_waits(self) -> Mapping[int, Wait]:
        """Return who waits for whom, as a hang's report says it or as the ranks' errors say it."""
        found = _WAITED.findall(self.text)
        return self.waits or {int(rank): Wait(action, int(peer)) for rank, action, peer in found}


# A condition, and the sentence for it; what the condition returns fills the sentence's {0}.
Row = tuple[Callable[[Evidence], object], str]


def likely_cause(evidence: Evidence) -> str | None:
    """Return the sentence of the first row that fits, or None where the evidence says too little."""
    for fits, sentence in TABLE:
        if found := fits(evidence):
            return sentence.format(found, n=evidence.ranks)
    return None


# The cycle of a deadlock, or the rank that is missing.


def waiting(pattern: str) -> Callable[[Evidence], object]:
    """Return a test of what the ranks that wait for one another do: "send", "receive", "both", "header"."""

    def fits(e: Evidence) -> object:
        if not (waits := e.who_waits()):
            return None
        ranks = chain(waits)
        last = waits[ranks[-1]]
        if last.peer != ranks[0]:
            return pattern == "absent" and f"rank {last.peer}"
        actions = {waits[rank].action.partition(" ")[0] for rank in ranks}
        is_in_collectives = any("a header" in waits[rank].action for rank in ranks)
        kind = "header" if is_in_collectives else actions.pop() if len(actions) == 1 else "both"
        return kind == pattern

    return fits


# One value, or all values of all ranks.


def is_n_times(power: int) -> Callable[[Evidence], object]:
    return lambda e: e.ranks > 1 and e.factor is not None and _close(e.factor, e.ranks**power)


def times(e: Evidence) -> object:
    return (
        e.factor is not None and 1.5 < e.factor < 10 and _close(e.factor, round(e.factor)) and round(e.factor)
    )


def one_of(e: Evidence) -> object:
    return (
        e.factor is not None
        and 0 < e.factor < 0.7
        and _close(1 / e.factor, round(1 / e.factor))
        and round(1 / e.factor)
    )


def across(relation: str) -> Callable[[Evidence], object]:
    return lambda e: e.across == relation


def kind(*kinds: str) -> Callable[[Evidence], object]:
    return lambda e: e.kinds & set(kinds) and _names(e, kinds)


def norm(is_small: bool) -> Callable[[Evidence], object]:
    return lambda e: "norm" in e.wrong and e.wrong["norm"].factor and (e.wrong["norm"].factor < 1) == is_small


def no_broadcast(e: Evidence) -> object:
    """Tell whether only rank 0 is right, and what is never trained differs, too."""
    if e.first is None or "parameter" not in e.first.what or not e.compared.keys() - {0} or 0 in e.compared:
        return None
    return "initial" in e.first.what or any("frozen" in name for name in e.wrong)


def buffers_differ(e: Evidence) -> object:
    return e.first is not None and "initial buffer" in e.first.what and 0 not in e.compared


def swapped(e: Evidence) -> object:
    found = [(name, other) for one in e.compared.values() for name, other in belongs_to(one).items()]
    return found and "`{}` has what belongs to `{}`".format(*found[0])


def of_microbatches(e: Evidence) -> object:
    is_scaled = e.kinds <= {"factor", "zero"} and "loss" not in e.wrong
    return not e.is_plain and not is_scaled and re.search("microbatch|accumulat", e.test)


def later_step(e: Evidence) -> object:
    found = re.search(r"step ([1-9]\d*)", e.first.what) if e.first and e.across != "mean" else None
    return found and f"Step {int(found[1]) - 1} was right and step {found[1]} is wrong"


def unsent(e: Evidence) -> object:
    return re.search("remain|not sent", e.test) and later_step(e)


def synchronisation(e: Evidence) -> object:
    return e.first and re.search(r"\bH \d", e.first.what) and later_step(e)


def shard_boundary(e: Evidence) -> object:
    """Return where a value begins to be wrong, if all before is right and all after it wrong."""
    for one in e.compared.values():
        for name in wrong_values(one):
            got, expected = one.pairs[name]
            if not name or not isinstance(got, Tensor) or getattr(expected, "shape", None) != got.shape:
                continue
            wrong = wrong_elements(got, expected)
            first = wrong.index(True) if True in wrong else 0
            if first and all(wrong[first:]):
                return f"`{name}` is right up to element {first - 1} and wrong from element {first} on"
    return None


def number(is_too_large: bool) -> Callable[[Evidence], object]:
    """Return a test of two numbers of things, or of two lists, that a plain assertion compares."""

    def fits(e: Evidence) -> object:
        if e.first is None or not e.first.is_plain or e.first.operator not in ("==", "<="):
            return None
        got, expected = (len(side) if isinstance(side, list) else side for side in e.first.pairs[""])
        if type(got) is not int or type(expected) is not int or got == expected:
            return None
        return (got > expected) == is_too_large and f"There are {got} where {expected} are due"

    return fits


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * abs(b)


def _names(e: Evidence, kinds: tuple[str, ...]) -> str:
    first, *others = (f"`{name}`" for name, one in e.wrong.items() if one.kind in kinds)
    shown = f"{first} and {len(others)} more" if others else first
    return "the result" if shown == "``" else shown


TABLE: tuple[Row, ...] = (
    # nothing: the ranks wait, refuse to go on, or should have refused
    (
        waiting("send"),
        "A deadlock: each rank of the cycle sends first and none receives. Let one receive first, or "
        "start the receive with irecv before you wait for the send.",
    ),
    (
        waiting("receive"),
        "A deadlock: each rank of the cycle receives first and none has sent. Does a send come too late?",
    ),
    (
        waiting("both"),
        "A deadlock: the ranks do their sends and receives in different orders, so a send never meets its"
        " receive. Is there one receive for each send, from the same rank and in the same order? Does a "
        "rank skip its receive, perhaps one from rank 0, because 0 counts as False?",
    ),
    (
        waiting("header"),
        "A deadlock: a rank sends a header as it begins a collective, and the ranks of the cycle wait in "
        "different calls. Do all ranks call the same collectives in the same order?",
    ),
    (
        waiting("absent"),
        "A deadlock: {0} never takes part, or waits, too. Does it return early, leave out a call, or "
        "start a message without waiting for it?",
    ),
    (
        lambda e: (found := _NO_ERROR.search(e.text)) and found[1],
        "A wrong use continues: the check that must refuse it with {0} is missing, or does not run on every "
        "rank.",
    ),
    (
        lambda e: "The ranks do not fit together" in e.text,
        "The ranks call different collectives, or the same ones in different orders: does a rank decide "
        "by what only that rank has seen? All ranks must agree on one order.",
    ),
    (
        lambda e: e.first and "in the group of ranks" in e.first.what,
        "The ranks are in two groups, and each must be as a job of its own: does every collective get the "
        "`group`?",
    ),
    # no value
    (
        buffers_differ,
        "The other ranks do not start with rank 0's buffers: is a broadcast of buffers missing?",
    ),
    (
        no_broadcast,
        "Only rank 0 is right, and what is never trained differs too: the other ranks have not started "
        "from rank 0's values. Is a broadcast missing?",
    ),
    (
        kind("extra", "zeros for none"),
        "There is a value of {0} where none should be: is one of an earlier step kept, or is one made for a "
        "frozen parameter?",
    ),
    (
        lambda e: e.first and "gradient" in e.first.what and kind("none for zeros")(e),
        "No rank used {0}: its gradient must be zeros, and is None.",
    ),
    (
        kind("missing"),
        "There is no value of {0}: is it not computed, or lost before it is written?",
    ),
    (
        kind("overflow"),
        "There is inf or nan in {0}: a sum overflows to inf where its dtype is too small (divide before "
        "adding up, or add up in a wider dtype), and an exponential where no maximum of all ranks was "
        "subtracted.",
    ),
    # the same values elsewhere
    (
        norm(is_small=True),
        "The norm is too small: it is that of one rank's part. Add up the squares over all ranks before "
        "the root.",
    ),
    (
        norm(is_small=False),
        "The norm is too large: what several ranks have a copy of is counted on each. Count it once.",
    ),
    (
        swapped,
        "{0}: the order of the two is confused on the way.",
    ),
    (
        kind("order"),
        "The numbers are right and in the wrong order: is each part written to the place of its rank, or "
        "of its microbatch?",
    ),
    # a number of things
    (
        number(is_too_large=True),
        "{0}: is something kept, sent or counted too often?",
    ),
    (
        number(is_too_large=False),
        "{0}: is something left out, or the same again?",
    ),
    # one rank's own values
    (
        across("mean"),
        "Each rank has its own values, and their mean would be right: they are not averaged over the "
        "ranks, or the average is not what is used in the end.",
    ),
    (
        across("sum"),
        "Each rank has its own part, and their sum would be right: the parts are not added up over the "
        "ranks. Is an all-reduce missing?",
    ),
    (
        across("groups"),
        "Some ranks agree with one another and not with the others: values never pass from one group of "
        "ranks to the other. Is a round missing? Does each round reach another partner?",
    ),
    # a factor
    (
        is_n_times(1),
        "There are {n} ranks: it is a sum over ranks that should be a mean, or it is added up twice.",
    ),
    (
        is_n_times(-1),
        "There are {n} ranks: it is divided by their number once too often, or one rank's part is taken "
        "for all.",
    ),
    (
        is_n_times(2),
        "That is {n} times {n}, with {n} ranks: it is added up over the ranks twice.",
    ),
    (
        times,
        "It is added up {0} times where a mean is due, or once too often for each microbatch or part: is "
        "a division missing?",
    ),
    (
        one_of,
        "It is divided by {0} once too often, or only one of {0} parts is used.",
    ),
    (
        lambda e: e.factor is not None and _close(e.factor, -1),
        "The sign is wrong.",
    ),
    (
        kind("zero"),
        "Only zeros arrive at {0}: are they cleared too early, or never written or added?",
    ),
    (
        of_microbatches,
        "Gradients of several microbatches must add up: is only the last one used, or is an earlier one "
        "cleared, overwritten or counted again? Or does each count alike, whatever its valid targets?",
    ),
    (
        unsent,
        "{0}: look at what a step leaves for the next one. Is what a rank has not sent kept on that rank, "
        "and added to its next gradient once?",
    ),
    (
        synchronisation,
        "{0}, and until they synchronise, ranks train alone. Look at what happens there: the sign, each "
        "factor, what an earlier round has left, and what is written into the parameters.",
    ),
    (
        later_step,
        "{0}: what the optimizer has updated is not what the ranks compute with. Are new parameters "
        "gathered, and old copies freed?",
    ),
    (
        kind("factors"),
        "Parts have different factors: is each round or hop adding or dividing once more?",
    ),
    # a part
    (
        shard_boundary,
        "{0}, as where one shard ends and the next begins: does each shard have what belongs to its own "
        "place?",
    ),
    (
        lambda e: e.kinds == {"rounded"},
        "It is right but for rounding: is something computed or sent in a smaller dtype?",
    ),
    (
        lambda e: e.across == "differ" and "gradient" in (e.first.what if e.first else ""),
        "The gradients differ between the ranks, so a part of them is not averaged over the ranks: does "
        "the average begin before all of them are there, or is something added on a rank afterwards?",
    ),
    (
        across("differ"),
        "The ranks end with different values: look at what each of them gets, and from whom. Is what "
        "arrives written into the tensors that were passed in?",
    ),
    (
        across("agree"),
        "All ranks have the same wrong values: look at what each rank puts in, before the ranks "
        "communicate. If values are only passed on, does each rank begin with its own part, and does each"
        " part arrive where it belongs?",
    ),
    (
        kind("part"),
        "A part of {0} is wrong: is one part left out, sent to the wrong rank or written to the wrong place?",
    ),
)
