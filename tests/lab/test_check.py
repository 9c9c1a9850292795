import pytest
import torch

from lab.check import assert_same, refuse_unequal
from lab.launch.errors import WorkbookError

W = torch.tensor([1.0, -2.0, 3.0]).double()


@pytest.mark.parametrize(
    "actual, message",
    [
        ({"w": W + torch.tensor([4e-9, 0, 0]), "unused": None}, "w: off by 4e-09"),
        ({"w": W * 4, "unused": None}, "w: 4 times what it should be"),
        ({"w": W}, "unused: only one side has it"),
        ({"w": W * float("nan"), "unused": None}, "w"),
    ],
)
def test_what_differs_is_named_and_so_is_a_constant_factor(actual, message):
    expected = {"w": W, "unused": None}
    assert_same({"w": W.clone(), "unused": None}, expected, rtol=0)
    with pytest.raises(AssertionError, match=message):
        assert_same(actual, expected)


def test_unequal_replicas_are_refused_and_the_ranks_named():
    refuse_unequal(["a", "a", "a"])
    with pytest.raises(WorkbookError, match="rank 1, 3 differs from rank 0"):
        refuse_unequal(["a", "b", "a", "c"])
