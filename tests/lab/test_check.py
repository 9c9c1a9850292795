import pytest
import torch
from torch import nn

from lab.check import (
    assert_same,
    gradients,
    module_digest,
    reference_gradients,
    refuse_unequal,
)
from lab.launch.errors import WorkbookError

EXPECTED = {"w": torch.tensor([1.0, -2.0, 3.0]).double(), "unused": None}


def test_equal_tensors_pass_with_no_tolerance():
    assert_same({"w": EXPECTED["w"].clone(), "unused": None}, EXPECTED, rtol=0)


def test_rounding_relative_to_the_largest_element_passes():
    assert_same({"w": EXPECTED["w"] + 2e-9, "unused": None}, EXPECTED, rtol=1e-9)


def test_more_than_rounding_fails_and_names_the_tensor():
    with pytest.raises(AssertionError, match=r"w: off by 4e-09"):
        assert_same({"w": EXPECTED["w"] + torch.tensor([4e-9, 0, 0]), "unused": None}, EXPECTED, rtol=1e-9)


def test_a_constant_factor_is_named():
    with pytest.raises(AssertionError, match="w: 4 times what it should be"):
        assert_same({"w": EXPECTED["w"] * 4, "unused": None}, EXPECTED)


def test_a_missing_gradient_and_an_unexpected_one_are_named():
    with pytest.raises(AssertionError, match="w: there is none, but one is expected"):
        assert_same({"w": None, "unused": None}, EXPECTED)
    with pytest.raises(AssertionError, match="unused: there is one, but none is expected"):
        assert_same({"w": EXPECTED["w"], "unused": torch.zeros(1)}, EXPECTED)


def test_a_tensor_that_only_one_side_has_is_named():
    with pytest.raises(AssertionError, match="unused: only one side has it"):
        assert_same({"w": EXPECTED["w"]}, EXPECTED)


def test_nan_never_passes():
    with pytest.raises(AssertionError, match="w"):
        assert_same({"w": EXPECTED["w"] * float("nan"), "unused": None}, EXPECTED)


def test_the_reference_forgets_gradients_from_before():
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.full((1, 2), 100.0)
    reference = reference_gradients(module, lambda m: m(torch.ones(1, 2)).sum())
    assert_same(reference, {"weight": torch.ones(1, 2)})
    assert gradients(module)["weight"] is not module.weight.grad


def test_a_digest_changes_with_a_single_bit():
    module = nn.Linear(2, 1)
    before = module_digest(module)
    with torch.no_grad():
        module.weight[0, 0] = torch.nextafter(module.weight[0, 0], torch.tensor(10.0))
    assert module_digest(module) != before


def test_unequal_replicas_are_refused_and_the_ranks_named():
    refuse_unequal(["a", "a", "a"])
    with pytest.raises(WorkbookError, match="rank 1, 3 differs from rank 0"):
        refuse_unequal(["a", "b", "a", "c"])
