"""What the checker says of a failure teaches: how far off, on which rank, and what usually causes that."""

import pytest
import torch

from exercises.causes import likely_cause
from exercises.difference import shown_difference
from exercises.evidence import Evidence
from exercises.relations import across_ranks, relation
from exercises.schedule_table import LEGEND, marked, wrong_table
from lab.ranks.compared import Compared
from lab.ranks.waiting import Wait
from pipeline_parallel.schedules import _Row, gpipe, interleaved_1f1b, one_f_one_b

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


@pytest.mark.parametrize(
    "compared, words",
    [
        (on_ranks(RIGHT * 2, RIGHT * 2), "sum over ranks that should be a mean"),
        (on_ranks(RIGHT / 2, RIGHT / 2), "divided by their number once too often"),
        (on_ranks(RIGHT * 4, RIGHT * 4), "added up over the ranks twice"),
        (on_ranks(RIGHT * 5, RIGHT * 5), "added up 5 times where a mean is due"),
        (on_ranks(RIGHT / 2 + NOISE, RIGHT / 2 - NOISE), "Is an all-reduce missing?"),
        (
            on_ranks(torch.tensor(0.6), torch.tensor(0.8), expected=1.0, name="norm"),
            "that of one rank's part",
        ),
        ({1: Compared("parameter", {"frozen.weight": (NOISE, RIGHT)}, 2)}, "Is a broadcast missing?"),
        (
            {0: Compared("gradient", {"a": (NOISE, RIGHT), "b": (RIGHT, NOISE)}, 2)},
            "`a` has what belongs to `b`",
        ),
    ],
)
def test_the_likely_cause_follows_from_the_numbers(compared, words):
    assert words in likely_cause(Evidence("a test", "", compared))


@pytest.mark.parametrize(
    "waits, words",
    [
        ({0: Wait("send 8 bytes to", 1), 1: Wait("send 8 bytes to", 0)}, "sends first and none receives"),
        ({0: Wait("receive from", 1), 1: Wait("receive from", 0)}, "receives first and none has sent"),
        ({0: Wait("send to", 1), 1: Wait("receive from", 0)}, "in different orders"),
        ({1: Wait("receive from", 0)}, "Rank 0 never takes part"),
    ],
)
def test_the_cause_of_a_deadlock_follows_from_who_waits_for_whom(waits, words):
    assert words in likely_cause(Evidence("a test", "no answer within 1 s.", waits=waits))


def test_errors_of_ranks_that_waited_until_the_timeout_make_a_cycle_too():
    text = (
        "rank 0 could not send to rank 1: it waited until the timeout; rank 1 could not send to rank 0: it "
    )
    assert "A deadlock" in likely_cause(Evidence("a test", text + "waited until the timeout;"))


def test_a_message_from_or_to_a_rank_that_does_not_exist_is_no_missing_call():
    stuck = "no answer within 1 s.\n  rank 0 is stuck at /comm/transport/wire.py:{} in {}: work"
    waits = {1: Wait("receive 8 bytes from", 0)}
    said = likely_cause(Evidence("a test", stuck.format(125, "irecv"), waits=waits))
    assert said.startswith("Rank 0 receives from a rank that does not exist.") and "no rank -1" in said
    assert "Rank 0 never takes" in likely_cause(Evidence("", stuck.format(61, "wait"), waits=waits))
    killed = Evidence("a test", "rank 3 was killed by SIGSEGV before it returned.")
    assert likely_cause(killed).startswith("A send to a rank that does not exist")


def test_nothing_is_guessed_where_nothing_is_known():
    assert likely_cause(Evidence("a test", "ZeroDivisionError: division by zero")) is None


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


def test_a_gradient_that_a_rank_does_not_have_is_told_in_words():
    what = "model.module.late.weight.grad is not None"
    one = Compared(what, {"": (None, None)}, 2, "is not", is_plain=True, message="naive")
    assert shown_difference({1: one}, 1) == "naive: `model.module.late.weight.grad` is None"
    assert likely_cause(Evidence("a test", "", {1: one})).startswith(
        "This rank has no gradient of `late.weight`."
    )


@pytest.mark.parametrize(
    "what, ranks, words",
    [
        ("gradient", (0,), "not averaged at all: then this is one rank's own value"),
        ("gradient", (0, 1), "a sum over ranks that should be a mean, or it is added up twice"),
        ("output", (0,), "2 ranks: something that only one rank should add is added by each"),
    ],
)
def test_a_value_as_often_as_there_are_ranks_has_several_causes(what, ranks, words):
    compared = {rank: Compared(what, {"weight": (RIGHT * 2, RIGHT)}, 2) for rank in ranks}
    assert words in likely_cause(Evidence("a test", "", compared))


def test_a_value_that_is_none_and_has_no_name_is_not_called_a_gradient():
    one = Compared("made.limit == 0.0", {"": (None, 0.0)}, None, is_plain=True)
    assert likely_cause(Evidence("a test", "", {None: one})).startswith("There is None where a value is due")


def test_a_formula_that_gives_zero_has_nothing_to_arrive():
    one = Compared("got == approx(seconds)", {"": (0.0, 0.002)}, None, is_plain=True)
    assert "arrive" not in (likely_cause(Evidence("a test", "", {None: one})) or "")


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


def test_a_schedule_of_another_type_is_refused_in_a_sentence():
    row = _Row()
    row.add("FB", 0)
    for table, sentence in (
        (None, "gpipe(1, 1) returns None, and not a list with one row of actions for each rank."),
        (
            [row],
            "gpipe(1, 1) has an object of type _Row for rank 0, and not a list of actions. Its list is its "
            "attribute `actions`.",
        ),
        ([["0F0", "0B0"]], "gpipe(1, 1), rank 0, slot 0: there is '0F0', and not an action."),
        ([[row.actions]], "gpipe(1, 1), rank 0, slot 0: there is an object of type list, and not an action."),
        ([("F", 0, 0)], "gpipe(1, 1), rank 0, slot 0: there is 'F', and not an action."),
        (row.actions, "gpipe(1, 1) has an Action for rank 0, and not a list of actions."),
    ):
        said = wrong_table(gpipe, lambda stages, microbatches, table=table: table)
        assert said.startswith(sentence) and "\n" not in said


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


def test_schedules_with_chunks_are_compared_too():
    def written(ranks: int, microbatches: int, chunks: int = 2):
        return [row[::-1] for row in interleaved_1f1b(ranks, microbatches, chunks)]

    assert "interleaved_1f1b(1, 1, 2), rank 0, slot 0" in wrong_table(interleaved_1f1b, written)


@pytest.mark.parametrize(
    "what, name, words",
    [
        (
            "gradient of step 0, 2 (pipeline) x 2 (data) x 1 (tensor), zero 1",
            "head.weight",
            "before the mean",
        ),
        ("gradient of step 0, 1 (pipeline) x 2 (tensor), zero 0, sequence parallel", "o_proj.bias", "tokens"),
        ("loss of step 0, 2 ranks = 1 (pipeline) x 1 (data) x 2 (context) x 1 (tensor)", "loss", "position"),
        (
            "gradient of step 0, 2 ranks = 1 (pipeline) x 2 (data) x 1 (tensor), experts on 2",
            "blocks.0.mlp.experts.3.up_proj.bias",
            "hold the same one",
        ),
        (
            "parameter after step 0 (its gradients and norm were right), zero 0",
            "weight",
            "each gradient scaled",
        ),
    ],
)
def test_on_a_mesh_the_names_of_wrong_values_say_what_is_not_completed(what, name, words):
    found = on_ranks(RIGHT + NOISE, RIGHT - 2 * NOISE, what=what, name=name)
    assert words in likely_cause(Evidence("", "", found, lesson="hybrid_parallel"))


def test_the_gradient_of_an_expert_may_be_a_sum_over_the_ranks_that_share_experts():
    name, what = "blocks.0.mlp.experts.3.up_proj.bias", "gradient of step 0, experts on 2"
    found = on_ranks(RIGHT * 2, RIGHT * 2, what=what, name=name)
    cause = likely_cause(Evidence("", "", found, lesson="hybrid_parallel"))
    assert "as many times too large as ranks share the experts" in cause


def test_a_wrong_factor_is_not_called_rounding_because_another_value_is_rounded():
    pairs = {"a": (RIGHT * 2.9, RIGHT), "b": (RIGHT * 1.0001 + 1e-4, RIGHT)}
    found = likely_cause(Evidence("", "", {0: Compared("parameter", pairs, 1)}))
    assert found is None or "rounding" not in found
