"""The checker finds causes where a test compares lists, and where only the lesson tells what numbers mean."""

import pytest
import torch

from exercises.causes import likely_cause
from exercises.evidence import Evidence
from lab.ranks.compared import Compared

RIGHT = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(6, 2)
NOISE = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(6, 2).sin()


def plain(got, expected, what: str = "got == expected", **more) -> dict[int | None, Compared]:
    return {None: Compared(what, {"": (got, expected)}, None, is_plain=True, **more)}


def cause(compared=None, text: str = "", test: str = "a test", lesson: str = "") -> str:
    return likely_cause(Evidence(test, text, compared or {}, lesson=lesson)) or ""


@pytest.mark.parametrize(
    "got, expected, words",
    [
        (["send", "send", "wait"], ["send", "wait", "send"], "`send` comes where `wait` is due"),
        (["wait", "wait"], ["wait"], "`wait` happens too often"),
        (["work", "work"], ["work", "launched", "work"], "`launched`. Is it left out"),
        ([3, 3, 1], [3, 2, 2], "may differ by one at most"),
    ],
)
def test_lists_of_events_and_sizes_show_what_is_out_of_place(got, expected, words):
    assert words in cause(plain(got, expected))


def test_names_in_a_list_are_no_events():
    assert cause(plain(["a.weight", "b.weight"], ["b.weight", "a.weight"])) == ""


@pytest.mark.parametrize(
    "got, expected, words",
    [
        ([[0.0, 0.0, 0.0]] * 3, [[0.0, 1.0, 2.0]] * 3, "always rank 0's value"),
        ([[2.0, 6.0]] * 3, [[2.0, 1.0], [2.0, 2.0], [2.0, 3.0]], "pass as it is"),
        (
            [[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]],
            [[0.0, 5.0], [6.0, 5.0], [0.0, 5.0]],
            "Rank 1 should have the sum",
        ),
    ],
)
def test_what_the_ranks_return_is_compared_with_what_is_expected_of_the_others(got, expected, words):
    assert words in cause(plain(got, expected, "run_ranks(work, 3) == expected"))
    assert words not in cause(plain(got, expected)), "these need not be results of ranks"


def test_an_assertion_about_all_ranks_tells_on_which_it_does_not_hold():
    text = "assert False\n +  where False = all([{}])\n +    where [...] = run_ranks(work, 3)"
    assert cause(text=text.format("True, False, False")).startswith("This holds on rank 0 only")
    assert cause(text=text.format("True, False, True")).startswith("This does not hold on rank 1:")


@pytest.mark.parametrize(
    "got, expected",
    [
        ([[0, 1, 2], [3]], [[0, 1], [2], [3]]),
        ([[0, 1], [2], [3]], [[0, 1, 2], [3]]),
        ([[0], [1, 2]], [[0, 1], [2]]),
    ],
)
def test_lists_of_the_same_members_are_divided_at_other_places(got, expected):
    assert "divided at other places" in cause(plain(got, expected))
    assert "left out" in cause(plain([[0], [1]], [[0], [1], [2]]))


def test_what_must_be_less_than_a_limit_is_not_a_number_of_things():
    assert cause(plain(8, 1, "sum(held[:-1]) < cap", operator="<")) == ""
    assert "There are 8 and at most 1 may be" in cause(plain(8, 1, "held <= limit", operator="<="))


def test_the_wrong_order_of_a_shuffle_has_nothing_to_do_with_places_of_ranks():
    shuffled = plain([3, 1, 0, 4, 2], [0, 2, 4, 1, 3])
    assert "does the shuffle depend on the seed" in cause(shuffled, test="equal those of torchs sampler")
    assert "place of its rank" in cause(shuffled, test="gathers")


def test_ranks_that_agree_in_groups_may_lack_a_round():
    compared = {
        rank: Compared("result", {"sum": (RIGHT + (1 if rank < 2 else 2) * NOISE, RIGHT)}, 4)
        for rank in range(4)
    }
    assert "Is a round missing? Does each round reach another partner?" in cause(compared)


def test_values_that_must_be_equal_are_not_too_many():
    said = cause(plain(2, 1, "len({len(share) for share in ours}) == 1"))
    assert "2 different values where all must be equal" in said
    assert "kept, sent or counted too often" in cause(plain(2, 1, "len(messages) == 1"))


def chunks(*numbers: int, right: tuple[int, ...] = ()) -> Compared:
    pairs = {f"chunk {k}": (RIGHT + (0 if k in right else k + 1) * NOISE, RIGHT) for k in numbers}
    return Compared("after the ring", pairs, 2)


def test_chunks_tell_which_half_of_a_ring_is_wrong():
    assert "is that sum what the next step sends" in cause({0: chunks(0), 1: chunks(1)})
    said = cause({0: chunks(0, 1, right=(0,)), 1: chunks(0, 1, right=(1,))})
    assert said.startswith("1 of 2 chunks are right on each rank")
    assert "begin with the one that it has completed" in said


@pytest.mark.parametrize(
    "largest, dtype, words",
    [
        (4e4, torch.float32, "add up in a wider dtype"),
        (2.0, torch.float16, "add up in a wider dtype"),
        (2.0, torch.float64, "Before exp(), subtract the largest value of all ranks"),
    ],
)
def test_inf_is_an_overflow_of_a_sum_only_where_a_sum_can_be_too_large(largest, dtype, words):
    expected = torch.full((3,), largest, dtype=dtype)
    assert words in cause({0: Compared("gradient", {"weight": (expected / 0, expected)}, 2)})


def test_every_second_number_lost_may_be_imaginary_parts():
    got = RIGHT * torch.tensor([0.9, 0.0])
    assert "imaginary parts are lost" in cause({0: Compared("gradient", {"weight": (got, RIGHT)}, 2)})


def in_pipeline(*gots: torch.Tensor | None, name: str = "input", what: str = "gradient, m=3") -> str:
    pairs = {rank: {name: (got, RIGHT)} for rank, got in enumerate(gots) if got is not None}
    compared = {rank: Compared(what, pair, len(gots)) for rank, pair in pairs.items()}
    return cause(compared, lesson="pipeline_parallel")


def test_the_rows_of_a_batch_tell_which_microbatches_are_wrong():
    assert "as if microbatches were mixed up" in in_pipeline(RIGHT.flip(0))
    piled_up = RIGHT + torch.tensor([0, 0, 1, 1, 2, 2]).unsqueeze(1) * NOISE
    assert "The first microbatch is right and all later ones are wrong" in in_pipeline(piled_up)


def test_gradients_that_are_wrong_before_the_last_stage_are_sent_back_wrong():
    wrong = RIGHT + NOISE
    assert "look at what a stage sends back" in in_pipeline(
        wrong, wrong, None, name="weight", what="gradient"
    )
    assert "sends back" not in in_pipeline(wrong, wrong, wrong, name="weight", what="gradient")
    one = Compared("gradient", {"weight": (wrong, RIGHT)}, 2)
    for text, lesson in (("rank 1 failed: died", "pipeline_parallel"), ("", "data_parallel")):
        assert "sends back" not in cause({0: one}, text, lesson=lesson)


def test_a_wrong_loss_and_wrong_gradients_of_a_pipeline_come_from_wrong_messages():
    pairs = {"input": (RIGHT + NOISE, RIGHT), "loss": (torch.tensor(1.01), torch.tensor(1.0))}
    assert "meant for it" in cause({0: Compared("result, m=3", pairs, 2)}, lesson="pipeline_parallel")


@pytest.mark.parametrize("is_sequence_parallel", [True, False])
def test_a_wrong_loss_of_tensor_parallel_ranks_points_to_the_forward(is_sequence_parallel):
    what = f"4 tokens, sequence_parallel {is_sequence_parallel}"
    compared = {rank: Compared(what, {"loss": (1.01, 1.0)}, 2) for rank in range(2)}
    said = cause(compared, lesson="tensor_parallel")
    assert "Does a row layer add up the outputs of all ranks" in said
    assert ("count positions" in said) == is_sequence_parallel


def test_a_gradient_that_is_wrong_though_the_output_is_right_points_to_the_backward():
    pairs = {"x": (RIGHT + NOISE, RIGHT), "y": (RIGHT, RIGHT)}
    compared = {rank: Compared("gradient", pairs, 3) for rank in range(3)}
    assert "the backward must communicate too" in cause(compared, lesson="comm")
    pairs["y"] = (RIGHT - NOISE, RIGHT)
    assert "the backward must communicate too" not in cause(compared, lesson="comm")


def test_values_that_are_wrong_from_one_element_on_show_where_a_shard_begins():
    got = RIGHT.clone()
    got.view(-1)[7:] += 0.3
    said = cause({0: Compared("parameter", {"weight": (got, RIGHT)}, 2)}, lesson="data_parallel")
    assert "`weight` is right up to element 6 and wrong from element 7 on" in said


@pytest.mark.parametrize(
    "message, words",
    [
        ("not the same on all ranks: ['', '']", "No rank raises an error"),
        ("not the same on all ranks: {'a', 'b'}", "Every rank must say the same"),
        ("own.weight is not here in the forward", "gathered before its forward"),
        ("own.weight is not here in the backward", "gathered again before the backward"),
        ("stages and microbatches [(1, 0)] are still held", "keep its graph"),
    ],
)
def test_the_message_of_an_assertion_points_to_what_it_is_about(message, words):
    assert words in cause(plain(False, True, "is_right", message=message))
    assert words in cause(text=f"rank 0 failed:\nAssertionError: {message}")
    assert cause(text=f"rank 0 failed:\n    assert is_right, {message!r}\nZeroDivisionError") == ""


def test_an_error_that_is_missing_is_named_and_not_the_line_of_pytest_that_misses_it():
    line = '    fail(f"DID NOT RAISE any of ({names})")\n'
    assert "refuse it with WorkbookError" in cause(
        text=f"{line}Failed: DID NOT RAISE any of (WorkbookError, X)"
    )
