"""What a failed assertion has compared is collected on the rank that fails."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from exercises.catalog import ROOT
from exercises.checker.compared import compared_in, remember, shown
from lab.check import assert_same

ONE, TWO = torch.ones(1), torch.full((1,), 2.0)


def compared_by(check, *arguments):
    with pytest.raises((Exception, pytest.fail.Exception)) as error:
        check(*arguments)
    return compared_in(error.value)


def test_comparisons_of_tensors_give_each_pair_also_those_that_agree_or_are_missing():
    got = {"a": ONE, "b": ONE, "c": None}
    found = compared_by(assert_same, got, {"a": TWO, "b": ONE, "c": ONE}, 1e-9, "gradient of naive")
    assert (found.what, found.is_plain) == ("gradient of naive", False)
    assert found.pairs == {"a": (ONE, TWO), "b": (ONE, ONE), "c": (None, ONE)}


@pytest.mark.parametrize(
    "got, expected, pairs",
    [
        (ONE, TWO, {"": (ONE, TWO)}),
        ([ONE], [TWO], {"0": (ONE, TWO)}),
        ({"w": ONE}, {"w": TWO}, {"w": (ONE, TWO)}),
        (None, ONE, {"": (None, ONE)}),  # torch refuses to compare these, with a TypeError
    ],
)
def test_torchs_assert_close_gives_its_tensors_and_the_line_that_calls_it(got, expected, pairs):
    def check():
        torch.testing.assert_close(got, expected)

    found = compared_by(check)
    assert (found.what, found.pairs) == ("`assert_close(got, expected)`", pairs)


def test_a_plain_assertion_gives_its_line_its_message_and_the_comparison_that_was_false():
    def check() -> None:
        remember("<=", 6, 3)  # as pytest does, where watched.py has been imported
        assert min(7, 6) <= 3, "too many"

    found = compared_by(check)
    assert found.what == '`assert min(7, 6) <= 3, "too many"`'
    assert (found.operator, found.pairs, found.message) == ("<=", {"": (6, 3)}, "too many")


def test_an_error_that_is_no_assertion_gives_its_class_its_text_and_its_line():
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
from exercises.catalog import ROOT
from exercises.checker.compared import compared_in
import test_failing
for check in (test_failing.check_0, test_failing.check_1, test_failing.check_2):
    try:
        check()
    except AssertionError as error:
        print([*compared_in(error).pairs.values()])
"""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
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
