"""Print a script's help: the options that a learner needs first, in groups, and with --help-all every one.

Help is printed before the ranks meet, on rank 0 alone.
"""

import os
import textwrap
import warnings
from argparse import Action
from collections.abc import Sequence
from typing import Any

import tyro

GROUPS: dict[str, tuple[str, ...]] = {
    "What is trained": ("steps", "epochs", "batch_size", "size"),
    "This lesson": (),
    "How ranks communicate": ("pattern", "link"),
    "How to look": ("metronome", "trace", "verbose", "json"),
}
"""The options by heading. Those that no heading names are the lesson's."""

RARE = {
    *("lr", "seed", "transport", "ignore_first", "eval_every", "allow_nonfinite", "optimizer", "clip"),
    *("checkpoint", "resume", "auto_resume", "model", "layers", "documents", "balance", "capacity"),
    *("aux_weight", "bias_rate"),
}
"""Options that only --help-all shows. A class with many options names those that are shown in `in_sight`."""

WIDTH, COLUMN = 80, 26  # of a line, and of the options' names in it


def print_help_if_asked(words: Sequence[str], arguments: type, prog: str) -> bool:
    """Print the help, on rank 0 alone, if a command line asks for it, and return whether it does."""
    if not {"-h", "--help", "--help-all"} & set(words):
        return False
    if os.environ.get("RANK", "0") == "0":
        print(full_help(arguments, prog) if "--help-all" in words else short_help(arguments, prog), end="")
    return True


def full_help(arguments: type, prog: str) -> str:
    """Return the help with every option."""
    return _parser(arguments, prog).format_help()


def short_help(arguments: type, prog: str) -> str:
    """Return the help with the options in sight."""
    mode = os.environ.get("RUN_MODE", "...")
    usage = [f"usage: {prog} [OPTIONS]", f"   or: make run RUN_MODE={mode} ARGS='[OPTIONS]'"]
    lines, by_name = [*usage, "", *textwrap.wrap(arguments.__doc__ or "", WIDTH)], {}
    for option in _parser(arguments, prog)._actions:
        by_name[name_of(option)] = option
    for heading, names in options_in_sight(arguments, list(by_name)).items():
        lines += ["", heading]
        for name in names:
            lines += _lines_of(by_name[name])
    others = f"--help-all (make run ARGS=--help-all) shows all {len(by_name) - 1} options."
    return "\n".join([*lines, "", others, ""])


def options_in_sight(arguments: type, names: Sequence[str]) -> dict[str, list[str]]:
    """Return those of a script's options `names` that the short help shows, by heading."""
    everywhere = {name for group in GROUPS.values() for name in group}
    own = [name for name in names if name not in everywhere | RARE and name != "help"]
    chosen = getattr(arguments, "in_sight", None)
    shown = {heading: list(group) or own for heading, group in GROUPS.items()}
    return {
        heading: found
        for heading, group in shown.items()
        if (found := [name for name in group if name in names and (chosen is None or name in chosen)])
    }


def name_of(option: Action) -> str:
    """Return the name of the option as the field of its dataclass: --no-bf16 is of bf16."""
    return option.option_strings[0].lstrip("-").replace("-", "_") if option.dest != "help" else "help"


def _parser(arguments: type, prog: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tyro.extras.get_parser(arguments, prog=prog)


def _lines_of(option: Action) -> list[str]:
    help_ = " ".join((option.help or "").split()).removesuffix(" (default: None)")
    is_switch, indent = "--no-" in option.option_strings[-1], " " * COLUMN
    name = option.option_strings[-1 if is_switch and help_.endswith("(default: True)") else 0]
    head = f"  {name}" if is_switch else f"  {name} {_choices(str(option.metavar))}"
    first, *others = textwrap.wrap(help_, WIDTH - COLUMN)
    heads = [head.ljust(COLUMN) + first]
    if len(head) >= COLUMN:
        heads = [*textwrap.wrap(head, WIDTH, subsequent_indent="    "), indent + first]
    return [*heads, *(indent + line for line in others)]


def _choices(metavar: str) -> str:
    """Return the values that an option takes, without None, which is no value to write."""
    return metavar.replace("{None}|", "").replace(",None}", "}").replace(",", ", ")
