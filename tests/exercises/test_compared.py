"""What a failed assertion has compared is collected on the rank that fails, and harms nothing."""

import pytest
import torch

from exercises.checker.compared import Compared, compared_in
from lab.check import assert_same


def compared_by(check, *arguments) -> Compared | None:
    with pytest.raises(AssertionError) as error:
        check(*arguments)
    return compared_in(error.value)


def test_comparisons_of_tensors_give_each_pair_also_those_that_agree_or_are_missing():
    one, two = torch.ones(1), torch.full((1,), 2.0)
    got = {"a": one, "b": one, "c": None}
    found = compared_by(assert_same, got, {"a": two, "b": one, "c": one}, 1e-9, "gradient of naive")
    assert (found.what, found.is_plain) == ("gradient of naive", False)
    assert found.pairs == {"a": (one, two), "b": (one, one), "c": (None, one)}
    assert compared_by(torch.testing.assert_close, [one], [two]).pairs == {"0": (one, two)}
    assert compared_by(torch.testing.assert_close, {"w": one}, {"w": two}).pairs == {"w": (one, two)}


def test_a_plain_assertion_gives_both_sides_of_the_part_that_is_false():
    def check(held: list[int], limit: int) -> None:
        assert len(held) == 2 and max(held) <= limit, "too many"

    found = compared_by(check, [1, 6], 3)
    assert (found.what, found.operator, found.pairs) == ("max(held)", "<=", {"": (6, 3)})
    assert found.is_plain and found.message == "too many"


def test_none_in_place_of_a_tensor_is_collected_although_torch_refuses_to_compare_it():
    def check(gradient: torch.Tensor | None) -> None:
        assert torch.equal(gradient, torch.ones(1))

    for compare in (check, lambda none: torch.testing.assert_close(none, torch.ones(1))):
        with pytest.raises((TypeError, AssertionError)) as error:
            compare(None)
        assert [*compared_in(error.value).pairs.values()] == [(None, torch.ones(1))]


def test_a_call_that_might_have_an_effect_is_not_repeated():
    calls = []

    def communicate() -> int:
        calls.append(1)
        return 3

    def check() -> None:
        assert communicate() == 4

    assert compared_by(check).pairs == {"": (3, 4)}  # pytest has kept the value
    assert calls == [1]
