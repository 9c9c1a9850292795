"""Gather what is known of a failed test: what each rank compared, and who waits for whom."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from exercises.relations import Relation, across_ranks, wrong_values
from lab.ranks.compared import Compared
from lab.ranks.waiting import Wait

_WAITED = re.compile(r"rank (\d+) could not (send to|receive from) rank (\d+): it waited until the timeout")


@dataclass(frozen=True)
class Evidence:
    """Hold what is known of a failed test: its name in words, the error, and what each rank compared.

    `lesson` is the folder that the test is about, such as "comm".
    """

    test: str
    text: str
    compared: Mapping[int | None, Compared] = field(default_factory=dict)
    waits: Mapping[int, Wait] = field(default_factory=dict)
    lesson: str = ""

    @cached_property
    def first(self) -> Compared | None:
        return next(iter(self.compared.values()), None)

    @cached_property
    def wrong(self) -> dict[str, Relation]:
        """The values that are wrong on any rank."""
        found: dict[str, Relation] = {}
        for one in self.compared.values():
            found = self.wrong_on(one) | found
        return found

    @staticmethod
    def wrong_on(one: Compared) -> dict[str, Relation]:
        """The values that are wrong on one rank."""
        return wrong_values(one)

    @cached_property
    def kinds(self) -> set[str]:
        return {one.kind for one in self.wrong.values()}

    @cached_property
    def ranks(self) -> int | None:
        return self.first.world_size if self.first else None

    @property
    def message(self) -> str:
        """The message of the assertion that has failed first, else the error without the lines of code."""
        lines = [line for line in self.text.splitlines() if not line.startswith(" ")]
        return (self.first.message if self.first else "") or "\n".join(lines)

    @cached_property
    def microbatches(self) -> int:
        found = re.search(r"\bm=(\d+)", self.first.what) if self.first else None
        return int(found[1]) if found else 1

    @cached_property
    def of_ranks(self) -> tuple[Tensor, Tensor] | None:
        """Return the numbers that the ranks got and those expected, a row for each rank.

        They are known where a test compares a list of what all ranks have returned.
        """
        if self.first is None or not self.first.is_plain or not self.first.what.startswith("run_ranks("):
            return None
        try:
            got, expected = (torch.tensor(side, dtype=torch.float64) for side in self.first.pairs[""])
        except (TypeError, ValueError):
            return None
        is_table = got.shape == expected.shape and got.dim() >= 2
        return (got.flatten(1), expected.flatten(1)) if is_table else None

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
