"""`make diff` shows what a step of a lesson changes in its concept, and nothing else."""

import functools
import itertools

import pytest

from lab.what_changed import SHORT, STEPS, difference
from tests.run_modes import SCRIPTS, python

PAIRS = [pair for names in STEPS for pair in itertools.pairwise(names)]


def text_of(before: str, after: str, signs: str) -> str:
    return "\n".join(text for sign, text in difference(before, after) if sign in signs)


@pytest.mark.parametrize("step", PAIRS, ids=" to ".join)
def test_every_step_changes_the_concept_and_not_the_loop(step: tuple[str, str]):
    text = text_of(*step, "-+")
    assert text and "def main(" not in text and "import " not in text
    assert {SHORT.get(name, name) for name in step} <= set(SCRIPTS)


def test_a_step_shows_what_it_is_about():
    assert "register_post_accumulate_grad_hook" in text_of("naive", "overlap", "+")
    assert "class Bucket:" in text_of("overlap", "buckets", "+")
    assert "all_gather" in text_of("zero2", "zero3_textbook", "+")
    assert "start_gather" in text_of("zero3_textbook", "zero3", "+")
    assert difference("naive", "naive") == []


def test_a_method_that_calls_the_one_it_overrides_adds_to_it():
    lines = difference("zero1", "zero2")
    place = lines.index(("@", "ZeroGradientOptimizer._launch"))
    assert {sign for sign, _ in itertools.takewhile(lambda line: line[0] != "@", lines[place + 1 :])} == {"+"}


def test_the_command_is_plain_where_it_is_piped_and_an_unknown_name_ends_in_a_sentence():
    run = functools.partial(python, "-m", "lab.what_changed")
    done = run("naive", "overlap")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert done.stdout.startswith("data_parallel/train_naive.py -> data_parallel/train_overlap.py\n")
    done = run("naiv", "overlap")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("'naiv' is none of the steps") and done.stderr.count("\n") == 1
    assert "naive -> overlap -> buckets" in run("", "").stdout
