"""What the checker says of a failure teaches: how far off, on which rank, and what usually causes that."""

import pytest
import torch

from exercises.checker.causes import Evidence, likely_cause
from exercises.checker.compared import Compared
from exercises.checker.failure import shown_difference
from exercises.checker.schedule_table import LEGEND, marked, wrong_table
from lab.ranks.waiting import Wait
from pipeline_parallel.schedules import gpipe, one_f_one_b

RIGHT = torch.tensor([1.0, -2.0, 3.0, 5.0], dtype=torch.float64)


def on_ranks(*gots: torch.Tensor, what: str = "gradient", expected=RIGHT, name: str = "weight"):
    return {rank: Compared(what, {name: (got, expected)}, len(gots)) for rank, got in enumerate(gots)}


NOISE = torch.tensor([0.3, 0.1, -0.5, 2.0], dtype=torch.float64)


MATRIX = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(6, 2)
FROM_7 = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(6, 2) * (torch.arange(12) >= 7).reshape(6, 2)


def plain(got, expected) -> dict[int | None, Compared]:
    return {None: Compared("got == expected", {"": (got, expected)}, None, "==", is_plain=True)}


# Other causes are those of mutants: end_to_end/test_mutants.py shows that the checker names them.
@pytest.mark.parametrize(
    "compared, words",
    [
        (on_ranks(RIGHT / 5, RIGHT / 5), "only one of 5 parts is used"),
        (on_ranks(-RIGHT, -RIGHT), "The sign is wrong"),
        (on_ranks(RIGHT + NOISE, RIGHT - NOISE), "their mean would be right"),
        (on_ranks(RIGHT / 2 + NOISE, RIGHT / 2 - NOISE), "Is an all-reduce missing?"),
        (on_ranks(RIGHT + NOISE, RIGHT + 2 * NOISE, what="output"), "end with different values"),
        (on_ranks(RIGHT * torch.tensor([2, 2, 4, 4]), RIGHT), "is each round or hop adding"),
        (on_ranks(RIGHT * 1.0001 + 1e-4, RIGHT), "right but for rounding"),
        (on_ranks(MATRIX + FROM_7, expected=MATRIX), "right up to element 6 and wrong from element 7 on"),
        (on_ranks(RIGHT + torch.tensor([0, 1, 2.5, 0]), expected=RIGHT), "A part of `weight` is wrong"),
        ({0: Compared("", {"a": (NOISE, RIGHT), "b": (RIGHT, NOISE)}, 2)}, "`a` has what belongs to `b`"),
        (plain([1], [1, 2]), "There are 1 where 2 are due: is something left out"),
    ],
)
def test_the_likely_cause_follows_from_the_numbers(compared, words):
    assert words in likely_cause(Evidence("a test", "", compared))


def test_the_text_of_an_error_and_the_name_of_a_test_are_evidence_too():
    refused = Evidence("a test", "Failed: DID NOT RAISE any of (WorkbookError, X)")
    assert "refuse it with WorkbookError" in likely_cause(refused)
    assert "agree on one order" in likely_cause(Evidence("a test", "The ranks do not fit together"))
    waited = "rank {} could not send to rank {}: it waited until the timeout; "
    assert "A deadlock" in likely_cause(Evidence("a test", waited.format(0, 1) + waited.format(1, 0)))
    found = on_ranks(RIGHT + NOISE, RIGHT + NOISE)
    assert "only the last one used" in likely_cause(Evidence("gradients of microbatches add up", "", found))


@pytest.mark.parametrize(
    "waits, words",
    [
        ({0: Wait("send 8 bytes to", 1), 1: Wait("send 8 bytes to", 0)}, "sends first and none receives"),
        ({0: Wait("receive from", 1), 1: Wait("receive from", 0)}, "receives first and none has sent"),
        ({0: Wait("send to", 1), 1: Wait("receive from", 0)}, "in different orders"),
        ({0: Wait("receive a header from", 1), 1: Wait("send to", 0)}, "the same collectives in the same"),
        ({1: Wait("receive from", 0)}, "rank 0 never takes part"),
    ],
)
def test_the_cause_of_a_deadlock_follows_from_who_waits_for_whom(waits, words):
    assert words in likely_cause(Evidence("a test", "no answer within 1 s.", waits=waits))


def test_nothing_is_guessed_where_nothing_is_known():
    assert likely_cause(Evidence("a test", "ZeroDivisionError: division by zero")) is None
    assert likely_cause(Evidence("a test", "", plain(["a"], ["b"]))) is None


def test_a_difference_names_the_value_the_element_and_both_numbers():
    compared = {2: Compared("gradient of naive", {"bias": (NOISE, NOISE), "weight": (RIGHT * 2, RIGHT)}, 3)}
    assert shown_difference(compared, 2) == (
        "gradient of naive `weight`: 2 times what it should be (element [3]: got 10, expected 5)"
    )
    none = Compared("initial buffer", {"scale": (None, RIGHT)}, 2)
    assert shown_difference({1: none}, 1) == "initial buffer `scale`: it is None, and a tensor is expected"


SENT = ("Traffic(bytes_sent=12, messages_sent=3)", "Traffic(bytes_sent=24, messages_sent=6)")
LONG = [list(range(20))] * 5


@pytest.mark.parametrize(
    "what, got, expected, operator, message, words",
    [
        ("max(held)", 6, 1, "<=", "a case", "a case: the largest of `held`: expected at most 1, got 6"),
        (
            "LEDGER.total()",
            *SENT,
            "==",
            "",
            "what the rank sends: expected 6 messages with 24 bytes, got 3 messages with 12 bytes",
        ),
        ("cut([1, 2], 2)", [1], [2], "==", "", "the result of `cut([1, 2], 2)`: expected [2], got [1]"),
        ("[f(x) for x in y]", 1, None, "is", "", "expected None, got 1"),
        ("rows", [*LONG, [1]], [*LONG, [2]], "==", "", "`rows`, element 5: expected [2], got [1]"),
        ("later", [1], None, "not", "", "`later` should be empty, and is [1]"),
        ("flat.any()", True, None, "not", "", "`flat` should be zero everywhere"),
        ("sent == 3", 2, 3, "==", "it sent 2 and not 3", "it sent 2 and not 3"),
    ],
)
def test_a_plain_assertion_is_told_in_words(what, got, expected, operator, message, words):
    plain = Compared(what, {"": (got, expected)}, 2, operator, is_plain=True, message=message)
    assert shown_difference({1: plain}, 1) == words


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
