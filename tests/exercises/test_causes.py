"""What the checker says of a failure teaches: how far off, on which rank, and what usually causes that."""

import pytest
import torch

from exercises.checker.causes import Evidence, likely_cause
from exercises.checker.failure import shown_difference
from exercises.checker.relations import across_ranks, relation
from exercises.checker.schedule_table import LEGEND, marked, wrong_table
from lab.ranks.compared import Compared
from lab.ranks.waiting import Wait
from pipeline_parallel.schedules import gpipe, one_f_one_b

RIGHT = torch.tensor([1.0, -2.0, 3.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "got, kind",
    [
        (RIGHT, None),
        (RIGHT * 3, "factor"),
        (RIGHT * 0, "zero"),
        (None, "missing"),
        (RIGHT[:2], "shape"),
        (RIGHT[[1, 0, 2, 3]], "order"),
        (RIGHT / 0, "overflow"),
        (RIGHT * 1.0001 + 1e-4, "rounded"),
        (RIGHT * torch.tensor([1, 1, 1, 2]), "part factor"),
        (RIGHT + torch.tensor([0, 0, 1.0, 2.5]), "part"),
        (RIGHT * torch.tensor([2, 2, 4, 4]), "factors"),
        (RIGHT + 1, "other"),
        (RIGHT + torch.tensor([1e-7, -1e-7, 1e-7, 0]), "rounded"),  # and not in another order
    ],
)
def test_a_value_is_related_to_what_was_expected(got, kind):
    found = relation(got, RIGHT)
    assert (found.kind if found else None) == kind


def test_zeros_are_not_the_same_as_no_gradient():
    assert relation(torch.zeros(2), None).kind == "zeros for none"
    assert relation(torch.ones(2), None).kind == "extra"
    assert relation(None, None) is None


def on_ranks(*gots: torch.Tensor, what: str = "gradient", expected=RIGHT, name: str = "weight"):
    return {rank: Compared(what, {name: (got, expected)}, len(gots)) for rank, got in enumerate(gots)}


NOISE = torch.tensor([0.3, 0.1, -0.5, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "gots, across",
    [
        ((RIGHT + NOISE, RIGHT - NOISE), "mean"),
        ((RIGHT / 2 + NOISE, RIGHT / 2 - NOISE), "sum"),
        ((RIGHT + NOISE, RIGHT + NOISE), "agree"),
        ((RIGHT + NOISE, RIGHT + 2 * NOISE), "differ"),
        ((RIGHT + NOISE, RIGHT + NOISE, RIGHT - NOISE, RIGHT - NOISE), "groups"),
    ],
)
def test_the_values_of_all_ranks_together_show_whether_they_were_reduced(gots, across):
    assert across_ranks(on_ranks(*gots), "weight") == across


MATRIX = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(6, 2)
FROM_7 = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(6, 2) * (torch.arange(12) >= 7).reshape(6, 2)


def plain(got, expected, operator: str = "==") -> dict[int | None, Compared]:
    return {None: Compared("got == expected", {"": (got, expected)}, None, operator, is_plain=True)}


@pytest.mark.parametrize(
    "compared, words",
    [
        (on_ranks(RIGHT * 2, RIGHT * 2), "sum over ranks that should be a mean"),
        (on_ranks(RIGHT / 2, RIGHT / 2), "divided by their number once too often"),
        (on_ranks(RIGHT * 4, RIGHT * 4), "added up over the ranks twice"),
        (on_ranks(RIGHT * 5, RIGHT * 5), "added up 5 times where a mean is due"),
        (on_ranks(RIGHT / 5, RIGHT / 5), "only one of 5 parts is used"),
        (on_ranks(-RIGHT, -RIGHT), "The sign is wrong"),
        (on_ranks(RIGHT + NOISE, RIGHT - NOISE), "their mean would be right"),
        (on_ranks(RIGHT / 2 + NOISE, RIGHT / 2 - NOISE), "Is an all-reduce missing?"),
        (on_ranks(*[RIGHT + NOISE] * 2, *[RIGHT - NOISE] * 2), "Does each round reach another partner?"),
        (on_ranks(RIGHT + NOISE, RIGHT + NOISE), "All ranks have the same wrong values"),
        (on_ranks(RIGHT + NOISE, RIGHT + 2 * NOISE), "does the average begin before all of them are there"),
        (on_ranks(RIGHT + NOISE, RIGHT + 2 * NOISE, what="output"), "end with different values"),
        (on_ranks(RIGHT * 0, RIGHT * 0), "Only zeros arrive at `weight`"),
        (on_ranks(RIGHT / 0, RIGHT / 0), "There is inf or nan in `weight`"),
        (on_ranks(RIGHT[[1, 0, 2, 3]], RIGHT), "right and in the wrong order"),
        (on_ranks(RIGHT * torch.tensor([2, 2, 4, 4]), RIGHT), "is each round or hop adding"),
        (on_ranks(RIGHT * 1.0001 + 1e-4, RIGHT), "right but for rounding"),
        (on_ranks(MATRIX + FROM_7, expected=MATRIX), "right up to element 6 and wrong from element 7 on"),
        (on_ranks(RIGHT + torch.tensor([0, 1, 2.5, 0]), expected=RIGHT), "A part of `weight` is wrong"),
        (on_ranks(torch.tensor(0.6), torch.tensor(0.8), expected=1.0, name="norm"), "one rank's part"),
        (on_ranks(torch.tensor(1.2), torch.tensor(1.2), expected=1.0, name="norm"), "Count it once"),
        (on_ranks(RIGHT + NOISE, RIGHT + NOISE, what="parameter after step 2"), "Step 1 was right"),
        ({1: Compared("parameter", {"frozen.weight": (NOISE, RIGHT)}, 2)}, "Is a broadcast missing?"),
        (
            {0: Compared("gradient", {"a": (NOISE, RIGHT), "b": (RIGHT, NOISE)}, 2)},
            "`a` has what belongs to `b`",
        ),
        ({0: Compared("gradient", {"a": (None, RIGHT)}, 2)}, "There is no value of `a`"),
        ({0: Compared("gradient", {"a": (RIGHT, None)}, 2)}, "is one of an earlier step kept"),
        (plain(8, 1), "There are 8 where 1 are due: is something kept"),
        (plain([1], [1, 2]), "There are 1 where 2 are due: is something left out"),
    ],
)
def test_the_likely_cause_follows_from_the_numbers(compared, words):
    assert words in likely_cause(Evidence("a test", "", compared))


@pytest.mark.parametrize(
    "test, text, words",
    [
        ("a test", "Failed: DID NOT RAISE any of (WorkbookError, X)", "refuse it with WorkbookError"),
        ("a test", "The ranks do not fit together", "agree on one order"),
    ],
)
def test_an_error_names_a_cause_too(test, text, words):
    assert words in likely_cause(Evidence(test, text))


def test_microbatches_are_named_where_the_test_is_about_them():
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


def test_errors_of_ranks_that_waited_until_the_timeout_make_a_cycle_too():
    waited = "rank {} could not send to rank {}: it waited until the timeout; "
    assert "A deadlock" in likely_cause(Evidence("a test", waited.format(0, 1) + waited.format(1, 0)))


def test_nothing_is_guessed_where_nothing_is_known():
    assert likely_cause(Evidence("a test", "ZeroDivisionError: division by zero")) is None
    assert likely_cause(Evidence("a test", "", plain(["a"], ["b"]))) is None
    assert likely_cause(Evidence("a test", "", plain(8, 1, operator="<"))) is None


def test_a_difference_names_the_value_the_element_and_both_numbers():
    compared = {2: Compared("gradient of naive", {"bias": (NOISE, NOISE), "weight": (RIGHT * 2, RIGHT)}, 3)}
    assert shown_difference(compared, 2) == (
        "gradient of naive `weight`: 2 times what it should be (element [3]: got 10, expected 5)"
    )
    plain = Compared("held == limit", {"": (6, 1)}, 2, is_plain=True)
    assert shown_difference({1: plain}, 1) == (
        "the test expects `held == limit`, but the left side is 6 and the right side 1"
    )


@pytest.mark.parametrize(
    "message, sentence",
    [
        ("too many microbatches", "too many microbatches (got 6, expected 1)"),
        (
            "{'a': 6}",
            "the test expects `held == limit`, but the left side is 6 and the right side 1: {'a': 6}",
        ),
        (
            "(5, 1, 'pad')",
            "in the case (5, 1, 'pad') the test expects `held == limit`, but the left side is 6 and the "
            "right side 1",
        ),
        ("naive", "naive: the test expects `held == limit`, but the left side is 6 and the right side 1"),
        (
            "all_reduce with ring: expected 0.1 s, got 0.2 s",
            "all_reduce with ring: expected 0.1 s, got 0.2 s",
        ),
    ],
)
def test_an_assertion_with_a_message_is_told_by_its_message(message, sentence):
    plain = Compared("held == limit", {"": (6, 1)}, 2, is_plain=True, message=message)
    assert shown_difference({1: plain}, 1) == sentence


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


@pytest.mark.parametrize("table", [None, [["0F0"]], [[[]]], [("F", 0, 0)], gpipe(1, 1)[0]])
def test_a_schedule_of_another_type_is_refused_in_a_sentence(table):
    said = wrong_table(gpipe, lambda stages, microbatches: table)
    assert said.startswith("gpipe(1, 1) returns ") and "one row for each rank" in said and "\n" not in said


def test_a_row_that_ends_early_or_goes_on_is_a_wrong_cell_too():
    right = gpipe(1, 1)
    assert "1 rows, and not 2" in marked(gpipe(2, 1), right, "gpipe(2, 1)")
    assert "slot 1: 0B0 is expected, but the row ends there." in marked(right, [right[0][:1]], "gpipe(1, 1)")
    assert "has 0F1 there, and the call has only 1 microbatch, numbered from 0." in marked(
        right, [gpipe(1, 2)[0][1:]], "gpipe(1, 1)"
    )
    assert "slot 2: no action is expected, but the row has 0F0" in marked(
        right, [[*right[0], right[0][0]]], "gpipe(1, 1)"
    )
