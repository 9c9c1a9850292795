"""What the checker says of a failure teaches: how far off, on which rank, and what usually causes that."""

import re
from dataclasses import dataclass

import pytest
import torch

from exercises.checker.causes import TABLE, Evidence, likely_cause
from exercises.checker.compared import Compared, compared_in, shown
from exercises.checker.failure import shown_difference
from exercises.checker.schedule_table import LEGEND, marked, wrong_table
from lab.ranks.waiting import Wait
from pipeline_parallel.schedules import gpipe, one_f_one_b
from tests.run_modes import ROOT, python

RIGHT = torch.tensor([1.0, -2.0, 3.0, 5.0], dtype=torch.float64)
NOISE = torch.tensor([0.3, 0.1, -0.5, 2.0], dtype=torch.float64)
FROM_2 = NOISE * torch.tensor([0, 0, 1, 1])


def on_ranks(*gots: torch.Tensor, first: int = 0, size: int | None = None, expected=RIGHT, what="gradient"):
    """Return what ranks have compared that did not get what is right, from rank `first` on."""
    size = size or len(gots)
    return {rank: Compared(what, {"weight": (got, expected)}, size) for rank, got in enumerate(gots, first)}


def seen(compared=None, test: str = "a test", text: str = "", **more) -> Evidence:
    return Evidence(test, text, compared or {}, **more)


def waits(*actions: str) -> Evidence:
    """Return what is seen of ranks of which each waits for the next one, and the last one for the first."""
    cycle = {rank: Wait(action, (rank + 1) % len(actions)) for rank, action in enumerate(actions)}
    return seen(text="no answer within 1 s.", waits=cycle)


def plain(got, expected, operator: str = "==", message: str = "") -> dict:
    return {None: Compared("`assert a == b`", {"": (got, expected)}, None, True, operator, message)}


CASES = [
    ("schedule cell", seen(on_ranks(RIGHT * 2), table="gpipe(1, 1) ..."), "in brackets"),
    ("deadlock cycle", waits("send 8 bytes to", "send 8 bytes to"), "sends first and none receives"),
    ("deadlock cycle", waits("receive from", "receive from"), "receives first and none has sent"),
    ("deadlock cycle", waits("send to", "receive from"), "in different orders"),
    ("deadlock cycle", waits("receive a header from", "send to"), "the same collectives in the same order"),
    ("refused", seen(text="The ranks do not fit together"), "agree on one order"),
    ("refused", seen(text="Failed: DID NOT RAISE <class 'lab.launch.WorkbookError'>"), "with WorkbookError"),
    ("zero", seen(on_ranks(RIGHT * 0, RIGHT * 0)), "Only zeros arrive at `weight`"),
    ("order", seen(on_ranks(RIGHT.flip(0), RIGHT.flip(0))), "right and in the wrong order"),
    ("mean", seen(on_ranks(RIGHT + NOISE, RIGHT - NOISE)), "their mean would be right"),
    ("sum across ranks", seen(on_ranks(RIGHT / 2 + NOISE, RIGHT / 2 - NOISE)), "an all-reduce missing?"),
    (
        "own values",
        seen(on_ranks(RIGHT + NOISE, RIGHT * 7, first=1, size=3, what="initial parameter")),
        "Only rank 0 is right",
    ),
    ("factor n", seen(on_ranks(RIGHT * 3, RIGHT * 3, RIGHT * 3)), "a sum over ranks that should be a mean"),
    ("factor n", seen(on_ranks(RIGHT * 4, RIGHT * 4)), "once too often for each microbatch or part"),
    ("factor 1/n", seen(on_ranks(RIGHT / 5, RIGHT / 5)), "only one of 5 parts is used"),
    ("factor 1/n", seen(on_ranks(RIGHT / 2, RIGHT / 2)), "divided by their number once too often"),
    (
        "missing microbatch",
        seen(on_ranks(RIGHT + NOISE, RIGHT + NOISE), "gradients of microbatches add up"),
        "is only the last one used",
    ),
    ("shard boundary", seen(on_ranks(RIGHT + FROM_2, RIGHT + FROM_2)), "as those of one shard do"),
]


@pytest.mark.parametrize("cause, evidence, words", CASES)
def test_each_cause_is_named_where_it_fits_and_is_the_first_that_does(cause, evidence, words):
    assert words in likely_cause(evidence)
    assert next(name for name, fits, _ in TABLE if fits(evidence)) == cause


def test_the_table_has_at_most_twelve_causes_and_a_case_of_each():
    assert [name for name, _, _ in TABLE] == list(dict.fromkeys(cause for cause, _, _ in CASES))
    assert len(TABLE) <= 12


@pytest.mark.parametrize(
    "evidence",
    [
        seen(text="ZeroDivisionError: division by zero"),
        seen(plain(["a"], ["b"])),
        seen(plain(4, 2)),
        seen(on_ranks(RIGHT + NOISE, RIGHT + NOISE)),  # all ranks have the same wrong values
        seen(on_ranks(RIGHT * 1.5, RIGHT * 1.5)),
        seen(on_ranks(RIGHT * 2, RIGHT / 2)),  # another factor on each rank
        seen(waits=({1: Wait("receive from", 0)})),  # rank 0 has ended, so there is no cycle
    ],
)
def test_nothing_is_guessed_where_no_cause_fits(evidence):
    assert likely_cause(evidence) is None


@pytest.mark.parametrize(
    "got, words",
    [
        (RIGHT * 2, "2 times what it should be (element [3]: got 10, expected 5)"),
        (None, "it is None, and a tensor is expected"),
        (RIGHT * 0, "there are only zeros (element [3]: got 0, expected 5)"),
        (RIGHT / 0, "inf or nan (element [0]: got inf, expected 1)"),
        (RIGHT[:2], "shape (2,) instead of (4,)"),
        (RIGHT.flip(0), "the right numbers in another order (element [1]: got 3, expected -2)"),
        (RIGHT + FROM_2, "wrong from element 2 on, and right elsewhere (element [3]: got 7, expected 5)"),
        (RIGHT + NOISE * torch.tensor([1, 0, 1, 0]), "wrong in 2 of 4 elements (element [2]: got 2.5, "),
        (RIGHT + NOISE, "off by 2, where the largest is 5 (element [3]: got 7, expected 5)"),
    ],
)
def test_what_was_seen_is_said_with_the_value_the_element_and_both_numbers(got, words):
    assert shown_difference(on_ranks(got, first=2, size=3), 2).startswith(f"gradient `weight`: {words}")


def test_of_several_wrong_values_the_clearest_is_shown_and_the_others_are_counted():
    pairs = {"bias": (NOISE, RIGHT), "weight": (RIGHT * 2, RIGHT), "scale": (RIGHT, RIGHT)}
    said = shown_difference({2: Compared("gradient of naive", pairs, 3)}, 2)
    assert said.startswith("gradient of naive `weight`: 2 times") and said.endswith("; 1 more differ")


LONG = [list(range(20))] * 5


@pytest.mark.parametrize(
    "compared, words",
    [
        (plain(6, 1, "<=", "a case"), "a case: expected at most 1, got 6"),
        (plain([1], [2]), "expected [2], got [1], in `assert a == b`"),
        (plain([*LONG, [1]], [*LONG, [2]]), "expected [2], got [1] at place 5, in `assert a == b`"),
        (plain("one\n" * 40 + "two", "one\n" * 40 + "six"), "expected six, got two at place 40, in `assert"),
        (plain(2, 3, message="it sent 2 and not 3"), "it sent 2 and not 3"),
        ({None: Compared("`assert not later`", {}, None, True)}, "`assert not later` does not hold"),
        (plain(RIGHT * 2, RIGHT), "`assert a == b`: 2 times what it should be (element [3]: got 10, "),
    ],
)
def test_a_plain_assertion_is_told_with_what_it_expects_and_its_line(compared, words):
    assert shown_difference(compared, None).startswith(words)


def test_a_wrong_schedule_is_shown_with_its_first_wrong_cell_in_brackets():
    def written(stages: int, microbatches: int):
        return gpipe(stages, microbatches)

    sentence, *rows = wrong_table(one_f_one_b, written).splitlines()
    assert sentence == "one_f_one_b(2, 2), rank 1, slot 1: 1B0 is expected, but the row has 1F1 there."
    assert rows == [
        "rank 0   0F0  0F1  0B0  0B1",
        "rank 1   1F0 [1F1] 1B0  1B1   expected in slot 1: 1B0",
        LEGEND,
    ]
    assert wrong_table(one_f_one_b, one_f_one_b) is None


def test_a_schedule_of_another_type_or_length_is_refused_in_a_sentence():
    for table in (None, [["0F0"]], [("F", 0, 0)]):
        said = wrong_table(gpipe, lambda stages, microbatches, table=table: table)
        assert said.startswith("gpipe(1, 1) returns ") and "one row for each rank" in said
    right = gpipe(1, 1)
    assert "1 rows, and not 2" in marked(gpipe(2, 1), right, "gpipe(2, 1)")
    assert "slot 1: 0B0 is expected, but the row ends there." in marked(right, [right[0][:1]], "gpipe(1, 1)")
    other = [[*right[0], right[0][0]]]
    assert "slot 2: no action is expected, but the row has 0F0" in marked(right, other, "gpipe(1, 1)")


def test_an_error_that_is_no_assertion_gives_its_class_its_text_and_its_line():
    def compared_by(check) -> Compared:
        with pytest.raises((Exception, pytest.fail.Exception)) as error:
            check()
        return compared_in(error.value)

    found = compared_by(lambda: [].nope)
    assert not found.pairs and not found.is_plain
    assert re.fullmatch(r"AttributeError: 'list' object .*, in `.*nope.*`", found.message)
    no_error = compared_by(lambda: pytest.fail("DID NOT RAISE <class 'WorkbookError'>"))
    assert no_error.message.startswith("there was no error, in `")


def test_where_assertions_are_watched_both_sides_are_known_also_of_tensors_and_of_none(tmp_path):
    failing = (
        "max([1, 6]) <= 3",
        "torch.equal(torch.ones(1), torch.zeros(1))",
        "torch.equal(None, torch.ones(1))",
    )
    checks = "".join(f"def check_{number}():\n    assert {one}\n" for number, one in enumerate(failing))
    (tmp_path / "test_failing.py").write_text(f"import torch\n{checks}")
    code = """
import exercises.checker.watched
from exercises.checker.compared import compared_in
import test_failing
for check in (test_failing.check_0, test_failing.check_1, test_failing.check_2):
    try:
        check()
    except AssertionError as error:
        print([*compared_in(error).pairs.values()])
"""
    done = python("-c", code, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout.splitlines() == [
        "[(6, 3)]",
        "[(tensor([1.]), tensor([0.]))]",
        "[(None, tensor([1.]))]",
    ], done.stderr


@dataclass(frozen=True)
class Sent:
    bytes_sent: int
    times: float


def test_a_value_is_shown_without_the_name_of_its_class_and_shortened():
    assert shown([Sent(8, 0.5)]) == "[bytes_sent=8, times=0.5]"
    assert shown([0.123456789, "a"]) == "[0.123457, a]"
    assert shown("") == "empty"
    assert len(shown("x" * 1000)) == 120
