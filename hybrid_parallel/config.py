"""Read a run's configuration: a YAML file, and `--key value` of a command line, which overrides the file.

    model: transformer              the default GPT, a GPT's size such as small, or mlp (lab/models/model.py)
    batch_size: 8                   examples per device: a step has batch_size x data
    num_gpus: 8                     number of processes, on GPUs or not
    pipeline_parallelism: True      True | False | number of stages
    zero_redundancy: True           True | False | 1 | 2 | 3; True is 1 beside a pipeline, and 2 without one
    sharding_strategy: manual       auto | manual; auto asks the planner for all that is not given as a number
    communication_pattern: ring     ring | tree | auto | torch

Every option of HybridArgs (arguments.py) is a key too. A mistake is refused in one sentence with the file,
the line and the key. The functions communicate nothing, so the launcher calls them before any process starts:

    python -m hybrid_parallel.config --config configs/config.yaml        # prints the number of processes
"""

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml

from comm.wire import slow_link
from hybrid_parallel.arguments import HybridArgs, Pattern, model_of, sizes_of
from hybrid_parallel.mesh import AXES
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.launch.errors import WorkbookError, reason
from lab.launch.usage import read_words
from training.arguments import Size
from training.validate import validate_arguments

BATCH_SIZE = 8  # examples per device
Choose = Callable[[HybridArgs, int, Mapping[str, Any]], ParallelSizes]
"""Returns the planner's choice for (arguments, number of processes, sizes that are given and must stay)."""

FIELDS = {"model": "size", "pipeline_parallelism": "pipeline", "zero_redundancy": "zero"}
FIELDS |= {"communication_pattern": "pattern"}
"""The keys that set an option of HybridArgs with another name. `model` sets `size`, unless it is a kind."""
OPTIONS = {name: hint for name, hint in get_type_hints(HybridArgs).items() if hint is not type(None)}
del OPTIONS["config"]
KEYS: dict[str, Any] = {
    "model": Literal["transformer", Size, "gpt", "mlp"],
    "batch_size": int,
    "num_gpus": int,
    "pipeline_parallelism": bool | int,
    "zero_redundancy": bool | Literal[1, 2, 3],
    "sharding_strategy": Literal["auto", "manual"],
    "communication_pattern": Pattern,
}
"""Every key with the type of its value."""
KEYS |= {name: hint for name, hint in OPTIONS.items() if name not in KEYS}


@dataclass(frozen=True)
class Config:
    """Holds a run's arguments and its number of processes."""

    args: HybridArgs
    num_processes: int


def load(path: str, overrides: Sequence[str] = (), choose: Choose | None = None) -> Config:
    """Return the configuration of a file, changed by a command line. Raise WorkbookError for a mistake.

    With `sharding_strategy: auto` a step has batch_size x num_gpus examples, and `choose` is called for the
    sizes that are not given. Without it they stay open.
    """
    entries = read_entries(path, overrides)
    values = {field: entry.value for field, entry in entries.items() if entry.value is not None}
    try:
        if "num_gpus" not in values:
            raise WorkbookError("there is no num_gpus; add it, as in num_gpus: 4.")
        for name in ("num_gpus", *AXES):
            if (size := values.get(name, 1)) is not False and size < 1:
                raise WorkbookError(f"{name} is {size}; it must be at least 1.")
        number, auto = values["num_gpus"], values.get("sharding_strategy") == "auto"
        options = {name: value for name, value in values.items() if name in OPTIONS}
        options = _without_open_sizes(options) if auto else _with_numbers(options, number)
        replicas = number if auto else sizes_of(HybridArgs(**options), number).data
        args = HybridArgs(**options | {"batch_size": options.get("batch_size", BATCH_SIZE) * replicas})
        if not auto:
            args = dataclasses.replace(args, **dataclasses.asdict(sizes_of(args, number)))
        validate_arguments(args, args.data or 1, args.model)
        if args.link is not None:
            slow_link.parse(args.link)
        args.validate(number)
        model = model_of(args)
        if auto and choose is not None:
            given = {f.name: options[f.name] for f in dataclasses.fields(ParallelSizes) if f.name in options}
            args = dataclasses.replace(args, **dataclasses.asdict(choose(args, number, given)))
        if not auto or choose is not None:
            refuse_sizes(sizes_of(args, number), model, args.batch_size, number, args.experts)
    except WorkbookError as error:
        raise _blame(error, path, entries) from error
    return Config(args, number)


def _blame(error: WorkbookError, path: str, entries: Mapping[str, "Entry"]) -> WorkbookError:
    """Return a refusal with the places of the entries that it names before a colon or semicolon."""
    fact = re.split("[:;]", str(error).replace("--", "").replace("-", "_"))[0]
    named = [entry for field, entry in entries.items() if re.search(rf"\b({field}|{entry.key})\b", fact)]
    places = [f"{entry.place} ({entry.key})" if len(named) > 1 else entry.place for entry in named]
    where = ", ".join(places).replace(f", {path}, ", ", ")  # the file is named once
    return WorkbookError(f"{where or path}: {error}")


def _without_open_sizes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the planner: True lets it choose, and False is a size of 1, or no ZeRO."""
    off = {"pipeline": 1, "zero": 0}
    kept = {name: value for name, value in options.items() if not (name in off and value is True)}
    return {name: off[name] if name in off and value is False else value for name, value in kept.items()}


def _with_numbers(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the options with numbers for True and False. Raise WorkbookError without a second stage."""
    pipeline, zero, data = options.get("pipeline", 1), options.get("zero", 0), options.get("data")
    if pipeline is True:  # what `data` leaves, or without it the least divisor above 1
        left = number // (options.get("tensor", 1) * options.get("context", 1) * (data or 1))
        if left < 2:
            raise WorkbookError(
                "pipeline_parallelism is True, but num_gpus leaves no process for a second stage; give it "
                "False, or a larger num_gpus."
            )
        pipeline = left if data is not None else next(n for n in range(2, left + 1) if left % n == 0)
    pipeline = int(pipeline) or 1  # False is 1
    zero = (1 if pipeline > 1 else 2) if zero is True else int(zero)
    return dict(options) | {"pipeline": pipeline, "zero": zero}


def read_command_line(words: Sequence[str], world_size: int, choose: Choose | None = None) -> HybridArgs:
    """Return the arguments of train_hybrid.py. Raise WorkbookError if too many or too few processes run."""
    path, overrides = split_config(words)
    if path is None:
        return read_words(words, HybridArgs)
    config = load(path, overrides, choose)
    if config.num_processes != world_size:
        raise WorkbookError(
            f"num_gpus is {config.num_processes}, but {world_size} processes have started; start them with "
            f"scripts/launch_training.sh, or give --num_gpus {world_size} too."
        )
    return config.args


def split_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the file that --config names, if it is there, and the other words of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        found, rest = parser.parse_known_args(words)
    except argparse.ArgumentError:
        raise WorkbookError("--config has no value; name a file, such as configs/config.yaml.") from None
    return found.config, rest


@dataclass(frozen=True)
class Entry:
    """Holds a key, what is written as its value, and where: "c.yaml, line 4", or "--tensor"."""

    key: str
    text: str
    place: str

    @property
    def field(self) -> str:
        """Return the name of the option that the entry sets."""
        is_kind = self.key == "model" and self.text in ("transformer", "gpt", "mlp")
        return "model" if is_kind else FIELDS.get(self.key, self.key)

    @property
    def value(self) -> Any:
        """Return the value as the type of the key. Raise WorkbookError if the text is none of it."""
        if self.key not in KEYS:
            near = difflib.get_close_matches(re.sub(r"\W", "_", self.key.lower()), KEYS, n=1)
            help_ = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}."
            raise WorkbookError(f"{self.place}: there is no key {self.key[:40]!r}; {help_}")
        try:
            value = read_value(self.text, kinds_of(KEYS[self.key]))
            return "gpt" if value == "transformer" else value
        except (ValueError, yaml.YAMLError):
            shown = repr(self.text[:40]) if self.text else "empty"
            what = f"{self.key} is {shown}; it must be {allowed(KEYS[self.key])}."
            raise WorkbookError(f"{self.place}: {what}") from None


def read_entries(path: str, overrides: Sequence[str]) -> dict[str, Entry]:
    """Return the entries of a file and of a command line, by the options that they set."""
    entries: dict[str, Entry] = {}
    for entry in read_file(path):
        if (first := entries.get(entry.field)) is not None:
            raise WorkbookError(
                f"{entry.place}: {entry.field} is given already, by {first.key} in line "
                f"{first.place.rpartition(' ')[2]}; keep one of the two."
            )
        entries[entry.field] = entry
    on_command_line = read_overrides(overrides)
    if any(entry.key == "model" for entry in on_command_line):
        entries.pop("model", None)  # --model small asks for a GPT, also where the file has an MLP
    return entries | {entry.field: entry for entry in on_command_line}


def read_file(path: str) -> list[Entry]:
    """Return the entries of a YAML file, all of them texts. Raise WorkbookError if it has none."""
    example = "write one key and its value a line, such as num_gpus: 8"
    try:
        root = yaml.compose(Path(path).read_text("utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        where = f"{path}, line {error.problem_mark.line + 1}" if error.problem_mark else path
        raise WorkbookError(f"{where}: this is not YAML ({error.problem}); {example}.") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise WorkbookError(f"--config {path}: the file cannot be read ({reason(error)}).") from error
    if not isinstance(root, yaml.MappingNode):
        raise WorkbookError(f"{path}: the file has no keys; {example}.")
    entries = []
    for key, value in root.value:
        place = f"{path}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            raise WorkbookError(f"{place}: a key or its value is a list or a mapping; {example}.")
        entries.append(Entry(key.value, value.value, place))
    return entries


def read_overrides(words: Sequence[str]) -> list[Entry]:
    """Return the entries of `--key value`, `--key=value`, and of the switches `--key` and `--no-key`."""
    entries: list[Entry] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--"):
            raise WorkbookError(f"The command line has {word!r} where --key value should stand.")
        if key not in KEYS and bool in kinds_of(KEYS.get(key.removeprefix("no_"))):
            key, text = key.removeprefix("no_"), "False"
        elif not equals and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        elif not equals and bool in kinds_of(KEYS.get(key)):
            text = "True"
        elif not equals and key in KEYS:
            raise WorkbookError(f"{option} has no value; write {option} VALUE.")
        entries.append(Entry(key, text, option))
    return entries


def kinds_of(hint: Any) -> list[Any]:
    """Return the types and constants of a union or Literal."""
    return [kind for part in get_args(hint) for kind in kinds_of(part)] or [hint]


def read_value(text: str, kinds: list[Any]) -> Any:
    """Return the text as one of the types, or as one of the constants. Raise an error if it is none."""
    value = None if text in ("", "None") else yaml.safe_load(text)
    if type(value) in kinds or any(type(value) is type(kind) and value == kind for kind in kinds):
        return value
    if float in kinds and not isinstance(value, bool):
        return float(text)  # YAML takes 1 for an integer, and 1e-3 for text
    if str in kinds and text.strip():
        return text
    raise ValueError


def allowed(hint: Any) -> str:
    """Return the allowed values as a phrase: "True, False or an integer"."""
    names = {bool: "True, False", int: "an integer", float: "a number", str: "a text", type(None): "None"}
    phrase = ", ".join(names.get(kind) or str(kind) for kind in kinds_of(hint))
    return " or ".join(phrase.rsplit(", ", 1))


def main(words: Sequence[str]) -> int:
    """Print the number of processes, or on stderr what is wrong. Return the exit code."""
    if "--help" in words or "-h" in words:
        print("usage: python -m hybrid_parallel.config --config FILE [--key value ...]\n")
        print("Print the number of processes that a configuration asks for. The keys, and their values:")
        print("\n".join(f"  {key:22} {allowed(hint)}" for key, hint in KEYS.items()))
        return 0
    try:
        path, overrides = split_config(words)
        if path is None:
            raise WorkbookError("There is no --config FILE, such as --config configs/config.yaml.")
        print(load(path, overrides).num_processes)
    except WorkbookError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
