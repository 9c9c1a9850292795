import pytest
import torch

from lab.check import (
    assert_same,
    refuse_unequal,
)
from lab.launch.errors import WorkbookError

EXPECTED = {"w": torch.tensor([1.0, -2.0, 3.0]).double(), "unused": None}


def test_equal_tensors_pass_with_no_tolerance():
    assert_same({"w": EXPECTED["w"].clone(), "unused": None}, EXPECTED, rtol=0)


def test_more_than_rounding_fails_and_names_the_tensor():
    with pytest.raises(AssertionError, match=r"w: off by 4e-09"):
        assert_same({"w": EXPECTED["w"] + torch.tensor([4e-9, 0, 0]), "unused": None}, EXPECTED, rtol=1e-9)


def test_a_constant_factor_is_named():
    with pytest.raises(AssertionError, match="w: 4 times what it should be"):
        assert_same({"w": EXPECTED["w"] * 4, "unused": None}, EXPECTED)


def test_a_tensor_that_only_one_side_has_is_named():
    with pytest.raises(AssertionError, match="unused: only one side has it"):
        assert_same({"w": EXPECTED["w"]}, EXPECTED)


def test_nan_never_passes():
    with pytest.raises(AssertionError, match="w"):
        assert_same({"w": EXPECTED["w"] * float("nan"), "unused": None}, EXPECTED)


def test_unequal_replicas_are_refused_and_the_ranks_named():
    refuse_unequal(["a", "a", "a"])
    with pytest.raises(WorkbookError, match="rank 1, 3 differs from rank 0"):
        refuse_unequal(["a", "b", "a", "c"])
