"""Print a script's help, and refuse a wrong command line in a sentence, before the ranks meet.

Help has the options that a learner needs first, in groups; with --help-all it has every one.
"""

import difflib
import os
import re
import textwrap
import warnings
from argparse import Action
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro
from tyro import _errors  # private, but the version is pinned: without it tyro prints a box of many lines

from lab.launch.errors import UsageError

GROUPS: dict[str, tuple[str, ...]] = {
    "What is trained": ("steps", "epochs", "batch_size", "size"),
    "This script": (),
    "How ranks communicate": ("pattern", "link"),
    "How to look": ("metronome", "trace", "verbose", "json"),
}
"""The options by heading. Those that no heading names are the script's own."""

RARE = {
    *("lr", "seed", "transport", "ignore_first", "eval_every", "allow_nonfinite", "optimizer", "clip"),
    *("checkpoint", "resume", "auto_resume", "model", "layers", "documents", "balance", "capacity"),
    *("aux_weight", "bias_rate"),
}
"""Options that only --help-all shows. A class with many options names those that are shown in `in_sight`."""

WIDTH, COLUMN = 80, 26  # of a line, and of the options' names in it


Arguments = TypeVar("Arguments")

KINDS = {"INT": "a whole number", "FLOAT": "a number"}  # by their names in the help


def is_told_by_rank_0() -> bool:
    """Return whether rank 0 has the same command line, because one command has started all ranks."""
    one_command = {"TORCHELASTIC_RUN_ID", "NODES"} & set(os.environ)  # of torchrun, of docker-compose.yaml
    return os.environ.get("RANK", "0") != "0" and bool(one_command)


def read_words(words: Sequence[str], arguments: type[Arguments]) -> Arguments:
    """Return the arguments of a command line. Raise UsageError, with one sentence, if it is wrong."""

    def refuse(event: _errors.ParseErrorEvent) -> None:
        where = "--help lists the usual options, --help-all all of them"
        raise UsageError(f"{_mistake(event, arguments)} ({where}).")

    with _errors.on_parse_error(refuse):
        return tyro.cli(arguments, args=words)


def _mistake(event: Any, arguments: type) -> str:
    """Return what is wrong, without a full stop."""
    if isinstance(event, _errors.UnrecognizedArgs):
        return _unknown(event.tokens[0], arguments)
    lowered = event.argument.lowered
    option, values = lowered.name_or_flags[-1], _choices(lowered.metavar)
    if isinstance(event, _errors.BadValue):
        is_missing = event.reason == "too_few_values"  # else the option is NotOffered
        return (
            f"{option} has no value: write {option} {values}" if is_missing else _unknown(option, arguments)
        )
    is_choice = isinstance(event, _errors.InvalidChoice)
    value = event.value if is_choice else re.findall("'(.*?)'", event.message)[0]
    return f"{option} is {value!r}; it must be {KINDS.get(values) or 'one of ' + values.strip('{}')}"


def _unknown(word: str, arguments: type) -> str:
    if not word.startswith("-"):
        return f"{word!r} follows no option that takes a value"
    name = word.partition("=")[0]
    options = [flag for option in _parser(arguments, "")._actions for flag in option.option_strings]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), options, n=1, cutoff=0.7)
    return f"There is no option {name}" + (f": did you mean {near[0]}?" if near else "")


def print_help_if_asked(words: Sequence[str], arguments: type, prog: str) -> bool:
    """Print the help if a command line asks for it, and return whether it does."""
    if not {"-h", "--help", "--help-all"} & set(words):
        return False
    if not is_told_by_rank_0():
        print(help_of(arguments, prog, "--help-all" in words), end="")
    return True


def help_of(arguments: type, prog: str, every: bool = False) -> str:
    """Return the help, with the options in sight or with every option."""
    mode = os.environ.get("RUN_MODE", "...")
    usage = [f"usage: {prog} [OPTIONS]", f"   or: make run RUN_MODE={mode} ARGS='[OPTIONS]'"]
    lines = [*usage, "", *textwrap.wrap(arguments.__doc__ or "", WIDTH)]
    by_name = {option.dest.replace("-", "_"): option for option in _parser(arguments, prog)._actions[1:]}
    for heading, names in option_groups(arguments, list(by_name), every).items():
        lines += ["", heading]
        for name in names:
            lines += _lines_of(by_name[name])
    if not every:
        lines += ["", f"--help-all instead of --help shows all {len(by_name)} options."]
    return "\n".join([*lines, ""])


def option_groups(arguments: type, names: Sequence[str], every: bool) -> dict[str, list[str]]:
    """Return a script's options `names` by heading: all, or those in sight."""
    everywhere = {name for group in GROUPS.values() for name in group}
    own = [name for name in names if name not in everywhere | RARE]
    shown = {heading: list(group) or own for heading, group in GROUPS.items()}
    if every:
        shown["Rarely needed"] = [name for name in names if name in RARE]
    in_sight = names if every else getattr(arguments, "in_sight", names)
    return {
        heading: found
        for heading, group in shown.items()
        if (found := [name for name in group if name in names and name in in_sight])
    }


def _parser(arguments: type, prog: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tyro.extras.get_parser(arguments, prog=prog)


def _lines_of(option: Action) -> list[str]:
    help_ = " ".join((option.help or "").split()).removesuffix(" (default: None)")
    is_switch, indent = "--no-" in option.option_strings[-1], " " * COLUMN
    name = option.option_strings[0 if help_.endswith("(default: False)") else -1]
    head = f"  {name}" if is_switch else f"  {name} {_choices(str(option.metavar))}"
    first, *others = textwrap.wrap(help_, WIDTH - COLUMN)
    heads = [head.ljust(COLUMN) + first]
    if len(head) >= COLUMN:
        heads = [*textwrap.wrap(head, WIDTH, subsequent_indent="    "), indent + first]
    return [*heads, *(indent + line for line in others)]


def _choices(metavar: str) -> str:
    """Return the values that an option takes, without None, which is no value to write."""
    values = metavar.replace("{None}|", "").replace(",None}", "}")
    return values.replace(",", ", ") if "{" in values else values
