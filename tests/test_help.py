"""The help of every script: each option says what it is, numbers in which unit, choices in one order."""

import functools
import re
import warnings
from argparse import Action
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import tyro

from comm.script import start
from lab.launch import usage
from lab.launch.errors import UsageError
from tests.run_modes import MODES, start_of

NAMES = [mode for mode, _, _ in MODES]
COUNTS_OR_HAS_A_UNIT = re.compile(r"\b[Nn]umber\b|\bMiB\b")


@functools.cache
def options_of(mode: str) -> list[Action]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(start_of(mode).arguments)
    return [action for action in parser._actions if "--help" not in action.option_strings]


def help_of(option: Action) -> str:
    """Return the option's help without the default that tyro adds."""
    return re.sub(r"\s*\(default: .*\)$", "", option.help or "", flags=re.DOTALL).replace("\n", " ")


@pytest.mark.parametrize("mode", NAMES)
def test_every_option_says_in_a_sentence_what_it_is_and_a_number_what_it_counts_or_its_unit(mode: str):
    options = options_of(mode)
    assert options
    for option in options:
        name, text = option.option_strings[-1], help_of(option)
        assert len(text.split()) >= 4, name
        assert text[0].isupper() and text.endswith("."), name
        if re.search("INT|FLOAT", str(option.metavar)):
            assert COUNTS_OR_HAS_A_UNIT.search(text), name


@pytest.mark.parametrize("mode", NAMES)
def test_a_wrong_choice_is_answered_with_the_choices_in_the_order_of_the_help(mode: str):
    arguments = start_of(mode).arguments
    for name, hint in get_type_hints(arguments).items():
        if get_origin(hint) is Literal:
            with pytest.raises(UsageError) as refused:
                usage.read_words([f"--{name.replace('_', '-')}", "no-such-choice"], arguments)
            choices = ", ".join(choice for choice in map(str, get_args(hint)) if choice != "None")
            assert f"'no-such-choice'; it must be one of {choices} (" in str(refused.value), name
        else:
            # tyro lists the choices of a union in the random order of a set.
            assert not any(get_origin(part) is Literal for part in get_args(hint)), name


@pytest.mark.parametrize("mode", NAMES)
def test_the_short_help_has_at_most_12_options_and_says_where_the_others_are(mode: str):
    arguments, everything = start_of(mode).arguments, options_of(mode)
    text = usage.help_of(arguments, "python x.py")
    shown = re.findall(r"^  --([a-z-]+)", text, re.MULTILINE)
    assert {"json", "steps"} & set(shown) and len(shown) <= 12
    assert text.endswith(f" shows all {len(everything)} options.\n")
    every = usage.help_of(arguments, "python x.py", every=True)
    assert len(re.findall(r"^  --", every, re.MULTILINE)) == len(everything)
    assert max(map(len, (text + every).splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--stepz 3", "There is no option --stepz: did you mean --steps?"),
        ("--metronome 20ms", "There is no option --metronome"),  # others have it
        ("--steps abc", "--steps is 'abc'; it must be a whole number"),
        ("--clip=x", "--clip is 'x'; it must be a number"),
        ("--steps --json", "--steps has no value: write --steps INT"),
        ("--json yes", "'yes' follows no option that takes a value"),
    ],
)
def test_a_wrong_command_line_is_answered_in_a_sentence(line: str, sentence: str):
    with pytest.raises(UsageError) as refused:
        usage.read_words(line.split(), start_of("zero3").arguments)
    assert str(refused.value).partition(" (--help lists")[0] == sentence


def test_help_is_printed_by_rank_0_alone_and_meets_nobody(capfd, monkeypatch):
    monkeypatch.setenv("NODES", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr("sys.argv", ["train_zero3.py", "--help" if rank == "1" else "--help-all"])
        start(*start_of("zero3"))
    assert capfd.readouterr().out.count("--allow-nonfinite") == 1
