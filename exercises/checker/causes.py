"""Name the likely cause of a failure by one table: how what the ranks got is related to what is right.

The rows of TABLE are tried in turn, and the first that fits is named. No row knows an exercise or a mutant.
Where none fits there is no guess: the reader is told what was seen, and no more.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from exercises.checker.compared import Compared
from exercises.checker.relations import Relation, across_ranks, wrong_values
from lab.ranks.waiting import Wait, chain


@dataclass(frozen=True)
class Evidence:
    """Hold what is known of a failed test: its name in words, the error, and what each rank compared.

    `waits` says which rank waits for which, and `table` shows the learner's schedule with a wrong cell.
    """

    test: str
    text: str
    compared: Mapping[int | None, Compared] = field(default_factory=dict)
    waits: Mapping[int, Wait] = field(default_factory=dict)
    table: str | None = None

    @cached_property
    def wrong(self) -> dict[str, Relation]:
        """The values that are wrong on any rank."""
        return {name: one for each in self.compared.values() for name, one in wrong_values(each).items()}

    @cached_property
    def kinds(self) -> set[str]:
        return {one.kind for one in self.wrong.values()}

    @property
    def ranks(self) -> int:
        return next((one.world_size or 0 for one in self.compared.values()), 0)

    @property
    def names(self) -> str:
        first, *others = (f"`{name}`" for name in self.wrong)
        return "the result" if first == "``" else f"{first} and {len(others)} more" if others else first

    @property
    def waiting(self) -> str | None:
        """The key of DEADLOCKS for what the ranks of a cycle wait for, or None without a cycle."""
        if not self.waits or self.waits[(cycle := chain(self.waits))[-1]].peer != cycle[0]:
            return None
        actions = {self.waits[rank].action for rank in cycle}
        if any("a header" in action for action in actions):
            return "header"
        kinds = {action.partition(" ")[0] for action in actions}
        return kinds.pop() if len(kinds) == 1 else "both"

    @cached_property
    def factor(self) -> float:
        """The factor of all wrong values on each rank, or 0.0 if they have several or none."""
        found = {one.factor for each in self.compared.values() for one in wrong_values(each).values()}
        return max(found) if found and max(found) - min(found) < 1e-3 * abs(max(found)) else 0.0

    def across(self) -> str | None:
        """Return "mean" or "sum" if that of the ranks' values would be right for one, and never the other.

        Where a value is missing or has another shape, that says more.
        """
        if self.kinds & {"none", "shape", "infinite"}:
            return None
        found = {across_ranks(self.compared, name) for name in self.wrong} - {None}
        return found.pop() if len(found) == 1 else None


# A cause's name, how it is noticed, and its sentence: {0} is what was noticed, {n} the number of ranks.
Row = tuple[str, Callable[[Evidence], object], str]


def likely_cause(evidence: Evidence) -> str | None:
    """Return the sentence of the first row that fits, or None where the evidence says too little."""
    for _, fits, sentence in TABLE:
        if found := fits(evidence):
            return sentence.format(found, n=evidence.ranks, names=evidence.names if evidence.wrong else "")
    return None


DEADLOCKS = {
    "send": "each rank of the cycle sends first and none receives. Let one receive first, or start the "
    "receive with irecv before you wait for the send.",
    "receive": "each rank of the cycle receives first and none has sent. Does a send come too late?",
    "both": "the ranks do their sends and receives in different orders, so a send never meets its receive. "
    "Is there one receive for each send, from the same rank and in the same order?",
    "header": "a rank sends a header as it begins a collective, and the ranks of the cycle wait in different "
    "calls. Do all ranks call the same collectives in the same order?",
}


def refused(e: Evidence) -> str | None:
    if "The ranks do not fit together" in e.text:
        return (
            "The ranks call different collectives, or the same ones in different orders: does a rank decide "
            "by what only that rank has seen? All ranks must agree on one order."
        )
    if found := re.search(r"DID NOT RAISE (?:any of \()?(?:<class ')?(?:\w+\.)*(\w+)", e.text):
        return f"A wrong use continues: the check that must refuse it with {found[1]} is missing."
    return None


def multiplied(e: Evidence) -> str | None:
    times = round(e.factor, 3)
    if times < 2 or times != round(times):
        return None
    if times == e.ranks:
        return (
            f"There are {e.ranks} ranks: it is a sum over ranks that should be a mean, or is added up twice."
        )
    return (
        f"It is added up {times:g} times where a mean is due, or once too often for each microbatch or part: "
        "is a division missing?"
    )


def divided(e: Evidence) -> str | None:
    parts = round(1 / e.factor, 3) if e.factor > 0 else 0.0
    if parts < 2 or parts != round(parts):
        return None
    if parts == e.ranks:
        return (
            f"There are {e.ranks} ranks: it is divided by their number once too often, or one rank's part is "
            "taken for all."
        )
    return f"It is divided by {parts:g} once too often, or only one of {parts:g} parts is used."


def only_rank_0_is_right(e: Evidence) -> bool:
    are_parameters = all(re.search("parameter|buffer", one.what) for one in e.compared.values())
    return are_parameters and bool(e.wrong) and e.compared.keys() == set(range(1, e.ranks))


def of_microbatches(e: Evidence) -> bool:
    is_plain = any(one.is_plain for one in e.compared.values())
    return bool(e.wrong) and not is_plain and re.search("microbatch|accumulat", e.test) is not None


TABLE: tuple[Row, ...] = (
    ("schedule cell", lambda e: e.table, "The first wrong cell is in brackets."),
    ("deadlock cycle", lambda e: DEADLOCKS.get(e.waiting or ""), "A deadlock: {0}"),
    ("refused", refused, "{0}"),
    (
        "zero",
        lambda e: e.kinds == {"zero"},
        "Only zeros arrive at {names}: are they cleared too early, or never written or added?",
    ),
    (
        "order",
        lambda e: "order" in e.kinds,
        "The numbers are right and in the wrong order: is each part written to the place of its rank, or of "
        "its microbatch?",
    ),
    (
        "mean",
        lambda e: e.across() == "mean",
        "Each rank has its own values, and their mean would be right: they are not averaged over the ranks, "
        "or the average is not what is used in the end.",
    ),
    (
        "sum across ranks",
        lambda e: e.across() == "sum",
        "Each rank has its own part, and their sum would be right: the parts are not added up over the "
        "ranks. Is an all-reduce missing?",
    ),
    (
        "own values",
        only_rank_0_is_right,
        "Only rank 0 is right, and each other rank has kept values of its own. Is a broadcast missing?",
    ),
    ("factor n", multiplied, "{0}"),
    ("factor 1/n", divided, "{0}"),
    (
        "missing microbatch",
        of_microbatches,
        "Gradients of several microbatches must add up: is only the last one used, or is an earlier one "
        "cleared, overwritten or counted again? Or does each count alike, whatever its valid targets?",
    ),
    (
        "shard boundary",
        lambda e: e.kinds == {"block"},
        "The wrong elements lie side by side, as those of one shard do: does each shard have what belongs to "
        "its own place?",
    ),
)
