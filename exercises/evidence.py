"""Gather what is known of a failed test: what each rank compared, and who waits for whom."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from exercises.relations import Relation, across_ranks, wrong_values
from lab.compared import Compared
from lab.waiting import Wait

_WAITED = re.compile(r"rank (\d+) could not (send to|receive from) rank (\d+): it waited until the timeout")


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
    def ranks(self) -> int | None:
        return self.first.world_size if self.first else None

    def across(self) -> str | None:
        """Return how the ranks' values are related, if that is the same for all whose relation is clear."""
        found = {across_ranks(self.compared, name) for name in self.wrong} - {None}
        clear = found - {"differ", "agree"}
        return next(iter(clear or found)) if len(clear or found) == 1 else None

    def mentions(self, *words: str) -> bool:
        return any(word in self.test for word in words)

    def who_waits(self) -> Mapping[int, Wait]:
        """Return who waits for whom, as a hang's report says it or as the ranks' errors say it."""
        found = _WAITED.findall(self.text)
        return self.waits or {int(rank): Wait(action, int(peer)) for rank, action, peer in found}
