"""Say what has probably caused a failure where lists are compared: events, sizes, or what ranks return."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from exercises.evidence import Evidence

_SOME_FALSE = re.compile(r"where False = all\(\[((?:True|False)(?:, (?:True|False))+)\]\)")
_ALL_EQUAL = re.compile(r"len\((?:set\(|\{).* == 1$")


def events(e: Evidence) -> str | None:
    """Name the first event, such as "send to 4", that does not happen where it should."""
    got, expected = _lists(e)
    if not all(isinstance(event, str) for event in [*got, *expected]) or not _are_repeated(got, expected):
        return None
    place = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(got), len(expected)) if place is None else place
    more, fewer = Counter(got) - Counter(expected), Counter(expected) - Counter(got)
    if not more and not fewer:
        return (
            f"The right things happen, in the wrong order: `{got[place]}` comes where `{expected[place]}` is "
            "due. Does something start too early, or is it awaited too late?"
        )
    if more and not fewer:
        return (
            f"`{next(iter(more))}` happens too often, or where nothing is due: is there nothing to send, or "
            "has it been done already?"
        )
    names = " and ".join(f"`{event}`" for event in fewer)
    return f"What is due does not happen: {names}. Is it left out, or done in another way?"


def sizes(e: Evidence) -> str | None:
    got, expected = _lists(e)
    if not all(type(value) is int for value in [*got, *expected]) or len(got) != len(expected) or not got:
        return None
    if sum(got) == sum(expected) and max(expected) - min(expected) <= 1 < max(got) - min(got):
        return "The sizes have the right total and are uneven: sizes of parts may differ by one at most."
    return None


def divided(e: Evidence) -> str | None:
    """Find out whether lists of lists, such as buckets, have the right members and begin at other places."""
    got, expected = _lists(e)
    if not got or not all(isinstance(part, list) for part in [*got, *expected]):
        return None
    if got == expected or list(chain.from_iterable(got)) != list(chain.from_iterable(expected)):
        return None
    return (
        "All are there, in the right order, and divided at other places: which condition ends one part and "
        "begins the next?"
    )


def all_equal(e: Evidence) -> str | None:
    """Explain an assertion that a set of values has one member."""
    if not e.first or not e.first.is_plain or not _ALL_EQUAL.search(e.first.what):
        return None
    return (
        f"There are {e.first.pairs[''][0]} different values where all must be equal: has a rank more or "
        "fewer than the others, or does something grow from one time to the next?"
    )


def some_ranks(e: Evidence) -> str | None:
    """Find out which ranks fulfil what the test asserts of all of them."""
    if not (found := _SOME_FALSE.search(e.text)) or "run_ranks" not in e.text:
        return None
    values = found[1].split(", ")
    if values.count("True") == 1:
        rank = values.index("True")
        return f"This holds on rank {rank} only: does rank {rank} alone do or await what all ranks must?"
    false = ", ".join(str(rank) for rank, value in enumerate(values) if value == "False")
    return f"This does not hold on rank {false}: does each rank do what all must?"


def results_of_ranks(e: Evidence) -> str | None:
    """Compare what the ranks got with what is expected on the others."""
    if e.of_ranks is None:
        return None
    gots, expecteds = e.of_ranks
    if _same(gots, expecteds[:, :1].expand_as(gots)) and expecteds.shape[1] > 1:
        return (
            "Each result is what only the first one should be: is an argument ignored, such as the root, so "
            "that always rank 0's value is taken?"
        )
    for column in range(gots.shape[1]):
        got, expected = gots[:, column], expecteds[:, column]
        if _same(got, expected):
            continue
        if len(set(expected.tolist())) > 1 and _same(got, expected.sum().expand_as(got)):
            return (
                "Each rank should have a value of its own, and all have the sum of these: something is added "
                "up over the ranks that should pass as it is. The backward of a sum over ranks is the "
                "identity."
            )
        root = int(expected.abs().argmax())
        if len(expected.nonzero()) == 1 and _same(got.sum(), expected[root]):
            return (
                f"Rank {root} should have the sum of what the ranks have, and each rank has its own part: a "
                "sum at one rank is missing. The backward of a broadcast is such a sum, at its root."
            )
    return None


def chunks(e: Evidence) -> str | None:
    """Look at which chunks of a ring are complete, on which rank."""
    if e.of_ranks is not None and e.mentions("ring"):
        gots, expecteds = e.of_ranks
        if all(_same(row, expecteds[0]) for row in expecteds) and not all(
            _same(row, gots[0]) for row in gots
        ):
            return _incomplete("The ranks have different values, and")
    compared = e.compared.values()
    if not compared or not all(name.startswith("chunk") for one in compared for name in one.pairs):
        return None
    if all(len(one.pairs) == 1 for one in compared):
        return _incomplete("After the steps that add up,")
    complete = {len(one.pairs) - len(e.wrong_on(one)) for one in compared}
    number = f"{complete.pop()} of {len(e.first.pairs)}" if e.first and len(complete) == 1 else "not all"
    return (
        f"{number} chunks are right on each rank. Where complete chunks are passed on, does each rank begin "
        "with the one that it has completed, and does each later step send the chunk that has just arrived?"
    )


def _incomplete(beginning: str) -> str:
    return (
        f"{beginning} chunks lack what some ranks should add, or have it twice: is what arrives added to the "
        "same chunk of this rank, and is that sum what the next step sends? Do both neighbours count chunks "
        "alike?"
    )


def _lists(e: Evidence) -> tuple[list, list]:
    if e.first is None or not e.first.is_plain:
        return [], []
    got, expected = e.first.pairs[""]
    return (got, expected) if isinstance(got, list) and isinstance(expected, list) else ([], [])


def _are_repeated(got: list, expected: list) -> bool:
    """Tell events from other texts, such as names: each is a word for something that is done."""
    return got != expected and bool(got) and ("wait" in got or len(set(expected)) < len(expected))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


OF_LISTS: tuple[Callable[[Evidence], str | None], ...] = (
    events,
    sizes,
    divided,
    all_equal,
    some_ranks,
    results_of_ranks,
    chunks,
)
