"""Read a run's configuration: a YAML file, and `--key value` of a command line, which overrides the file.

    model: small                    a GPT's size, or mlp (lab/models/model.py)
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

import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml

from comm.script import command_line
from comm.wire import slow_link
from hybrid_parallel.arguments import (
    HybridArgs,
    Pattern,
    microbatches_for,
    model_of,
    sizes_of,
)
from hybrid_parallel.mesh import AXES
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.launch.errors import WorkbookError, reason
from training.arguments import Size
from training.validate import MAX_BATCH, validate_arguments

BATCH_SIZE = 8  # examples per device
MAX_PROCESSES = 1 << 20
Choose = Callable[[HybridArgs, int, Mapping[str, Any]], ParallelSizes]
"""Returns the planner's choice for (arguments, number of processes, sizes that are given and must stay)."""

FIELDS = {"model": "size", "pipeline_parallelism": "pipeline", "zero_redundancy": "zero"}
FIELDS |= {"communication_pattern": "pattern"}
"""The keys that set an option of HybridArgs with another name. `model` sets `size`, unless it is a kind."""
OPTIONS = {name: hint for name, hint in get_type_hints(HybridArgs).items() if hint is not type(None)}
del OPTIONS["config"]
KEYS: dict[str, Any] = {
    "model": Literal[Size, "gpt", "mlp"],
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
    """Holds a run's arguments and its number of processes.

    With `auto` a planner chooses the sizes, except those in `given`, and `args` has them only after that. The
    batch is then batch_size x num_gpus examples, so that all plans train the same.
    """

    args: HybridArgs
    num_processes: int
    auto: bool
    given: Mapping[str, Any]


def load(path: str, overrides: Sequence[str] = (), choose: Choose | None = None) -> Config:
    """Return the configuration of a file, changed by a command line. Raise WorkbookError for a mistake.

    With `sharding_strategy: auto`, `choose` is called. Without it the sizes stay open.
    """
    settings = Settings(path, overrides)
    number = settings.number("num_gpus", None, MAX_PROCESSES)
    batch_size = settings.number("batch_size", BATCH_SIZE, MAX_BATCH)
    auto = settings.values.get("sharding_strategy") == "auto"
    options = {name: value for name, value in settings.values.items() if name in OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    for axis in AXES:
        if (size := options.get(axis, 1)) is not False and size < 1:
            raise settings.error(f"{axis} is {size}; it must be at least 1.", axis)
    options = _without_open_sizes(options) if auto else _with_all_sizes(settings, options, number, batch_size)
    examples = batch_size * (number if auto else options["data"])
    if examples > MAX_BATCH:
        raise settings.error(
            f"batch_size is {batch_size} per device, which makes {examples} examples in a step; there can be "
            f"at most {MAX_BATCH}.",
            *("batch_size", "num_gpus", "data"),
        )
    args = HybridArgs(**options | {"batch_size": examples})
    given = {f.name: options[f.name] for f in dataclasses.fields(ParallelSizes) if f.name in options}
    try:
        validate_arguments(args, args.data or 1, args.model)
        if args.link is not None:
            slow_link.parse(args.link)
        args.validate(number)
        model = model_of(args)
        if auto and choose is not None:
            args = dataclasses.replace(args, **dataclasses.asdict(choose(args, number, given)))
        if not auto or choose is not None:
            refuse_sizes(sizes_of(args, number), model, args.batch_size, number, args.experts)
    except WorkbookError as error:
        raise settings.blame(error) from error
    return Config(args, number, auto, given)


def _without_open_sizes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the planner: True lets it choose, and False is a size of 1, or no ZeRO."""
    off = {"pipeline": 1, "zero": 0}
    kept = {name: value for name, value in options.items() if not (name in off and value is True)}
    return {name: off[name] if name in off and value is False else value for name, value in kept.items()}


def _with_all_sizes(
    settings: "Settings", options: Mapping[str, Any], number: int, batch_size: int
) -> dict[str, Any]:
    """Return the options with all sizes. Raise WorkbookError if no product of the axes can be `number`."""
    tensor, context, data = options.get("tensor", 1), options.get("context", 1), options.get("data")
    pipeline = options.get("pipeline", 1)
    if pipeline is True:  # what `data` leaves, or without it the least divisor above 1
        left = number // (tensor * context * (data or 1))
        if left < 2:
            raise settings.error(
                "pipeline_parallelism is True, but there is no process for a second stage; give it False, or "
                "a larger num_gpus.",
                *("pipeline", "num_gpus", "data", "context", "tensor"),
            )
        pipeline = left if data is not None else next(n for n in range(2, left + 1) if left % n == 0)
    pipeline = int(pipeline) or 1  # False is 1
    others = pipeline * context * tensor * (data or 1)
    if number % others or (data is not None and others != number):
        sizes = {"pipeline": pipeline, "data": data or "?", "context": context, "tensor": tensor}
        shown = [f"{size} ({axis})" for axis, size in sizes.items() if axis != "context" or size != 1]
        sentence = (
            f"{number} processes cannot be {' x '.join(shown)}; the product of the axes must be num_gpus."
        )
        raise settings.blame(WorkbookError(sentence))
    zero = options.get("zero", 0)
    zero = (1 if pipeline > 1 else 2) if zero is True else int(zero)
    sizes = {"pipeline": pipeline, "data": data or number // others, "tensor": tensor, "zero": zero}
    return {"microbatches": microbatches_for(batch_size, pipeline)} | dict(options) | sizes


def read_command_line(words: Sequence[str], world_size: int, choose: Choose | None = None) -> HybridArgs:
    """Return the arguments of train_hybrid.py: from --config and changes of its keys, or from options.

    Raise WorkbookError unless as many processes have started as the configuration asks for.
    """
    path, overrides = split_config(words)
    if path is None or "--help" in words or "-h" in words:
        return command_line(HybridArgs)
    config = load(path, overrides, choose)
    if config.num_processes != world_size:
        raise WorkbookError(
            f"num_gpus is {config.num_processes}, but {world_size} processes have started; start them with "
            f"scripts/launch_training.sh, or give --num_gpus {world_size} too."
        )
    return config.args


def split_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the file that --config names, if it is there, and the other words of a command line."""
    path, rest = None, list[str]()
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--config" and (not left or left[0].startswith("--")):
            raise WorkbookError("--config has no value; name a file, such as configs/config.yaml.")
        if word == "--config" or word.startswith("--config="):
            path = left.pop(0) if word == "--config" else word.partition("=")[2]
        else:
            rest.append(word)
    return path, rest


@dataclass(frozen=True)
class Entry:
    """Holds a key, what is written as its value, and where: "line 4", or "--tensor" on the command line."""

    key: str
    text: str
    place: str

    @property
    def field(self) -> str:
        """Return the name of the option that the entry sets."""
        is_kind = self.key == "model" and self.text in ("gpt", "mlp")
        return "model" if is_kind else FIELDS.get(self.key, self.key)


class Settings:
    """Holds the entries of a file and of a command line by what they set, and their values."""

    def __init__(self, path: str, overrides: Sequence[str]) -> None:
        self._path = path
        in_file, self._last_line = read_file(path)
        on_command_line = read_overrides(overrides)
        self._entries: dict[str, Entry] = {}
        for entry in in_file:
            validate_key(entry.key, f"{path}, {entry.place}")
            same_key = (e for e in self._entries.values() if e.key == entry.key)
            if (first := self._entries.get(entry.field) or next(same_key, None)) is not None:
                same = f"means the same as {first.key}" if first.key != entry.key else "is given already"
                raise WorkbookError(
                    f"{path}, {entry.place}: {entry.key} {same} in {first.place}; keep one of the two."
                )
            self._entries[entry.field] = entry
        if any(entry.key == "model" for entry in on_command_line):
            self._entries.pop("model", None)  # --model small asks for a GPT, also where the file has an MLP
        self._entries |= {entry.field: entry for entry in on_command_line}
        self.values = {field: self._value(entry) for field, entry in self._entries.items()}

    def _value(self, entry: Entry) -> Any:
        for kind in kinds_of(KEYS[entry.key]):
            if (found := read_as(entry.text, kind)) is not None:
                return found[0]
        shown = repr(entry.text[:40]) if entry.text else "empty"
        raise self._error(f"{entry.key} is {shown}; it must be {allowed(KEYS[entry.key])}.", [entry])

    def number(self, key: str, default: int | None, largest: int) -> int:
        """Return the value of a key, from 1 to `largest`. Without a default the key must be there."""
        value = self.values.get(key, default)
        if value is None:
            raise WorkbookError(
                f"{self._path}, line {self._last_line}: the file ends without {key}; add it, as in {key}: 4."
            )
        if not 1 <= value <= largest:
            raise self.error(f"{key} is {value}; it must be from 1 to {largest}.", key)
        return value

    def error(self, sentence: str, *fields: str) -> WorkbookError:
        """Return the error with the places of the entries that set these fields in front."""
        return self._error(sentence, [self._entries[field] for field in fields if field in self._entries])

    def blame(self, error: WorkbookError) -> WorkbookError:
        """Return a refusal with the places of the entries in front that it names by option or size.

        What follows a colon or semicolon is advice, and may name what is not wrong.
        """
        sentence = re.sub(
            r"^--([\w-]+) (\S+): ", lambda m: f"{m[1].replace('-', '_')} is {m[2]}: ", str(error)
        )
        fact = re.split("[:;]", sentence.replace("--", "").replace("-", "_"))[0]
        nouns = {"pipeline": "pipeline|stages?", "chunks": "chunks|stages", "schedule": "schedule|stages"}
        nouns |= {"data": "data|replicas", "batch_size": "batch_size|examples", "size": "heads|the model"}
        nouns |= {"num_gpus": "num_gpus|processes|devices"}
        fields = [f for f in self._entries if re.search(rf"\b({nouns.get(f, f)})\b", fact)]
        return self.error(sentence, *(fields or ["num_gpus"]))

    def _error(self, sentence: str, entries: Sequence[Entry]) -> WorkbookError:
        in_file = [e for e in entries if not e.place.startswith("--")]
        places = [self._path] if in_file else []
        for entry in [*in_file, *(e for e in entries if e not in in_file)]:
            is_named = len(entries) == 1 and entry.key in sentence
            is_option = entry.place.startswith("--")
            places.append(entry.place if is_named or is_option else f"{entry.place} ({entry.key})")
        return WorkbookError(f"{', '.join(places)}: {sentence}")


def read_file(path: str) -> tuple[list[Entry], int]:
    """Return the entries of a YAML file and its number of lines. Raise WorkbookError if it has no entries.

    Only texts are read, and nothing is constructed from them, so a file can contain no program.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise WorkbookError(f"--config {path}: the file cannot be read ({reason(error)}).") from error
    last = max(1, len(text.splitlines()))
    example = "write one key and its value a line, such as num_gpus: 8"
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = min(mark.line + 1, last) if mark else 1
        problem = (
            getattr(error, "problem", None) or getattr(error, "reason", None) or "too many lists in lists"
        )
        raise WorkbookError(f"{path}, line {line}: this is not YAML ({problem}); {example}.") from None
    if not isinstance(root, yaml.MappingNode):
        line = last if root is None else root.start_mark.line + 1
        raise WorkbookError(f"{path}, line {line}: the file has no keys; {example}.")
    entries = []
    for key, value in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            name = f"{key.value} is" if isinstance(key, yaml.ScalarNode) else "a key is"
            raise WorkbookError(f"{path}, line {line}: {name} a list or a mapping; {example}.")
        entries.append(Entry(key.value, value.value, f"line {line}"))
    return entries, last


def read_overrides(words: Sequence[str]) -> list[Entry]:
    """Return the entries of `--key value`, `--key=value`, and of the switches `--key` and `--no-key`."""
    entries: list[Entry] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, text = word.partition("=")
        if not option.startswith("--") or option == "--":
            raise WorkbookError(f"The command line has {word!r} where --key value should stand.")
        key = option[2:].replace("-", "_")
        if key not in KEYS and key.startswith("no_") and bool in kinds_of(KEYS.get(key[3:])) and not equals:
            key, text, equals = key[3:], "False", "="
        validate_key(key, option)
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif bool in kinds_of(KEYS[key]):
                text = "True"
            else:
                raise WorkbookError(f"{option} has no value; write {option} VALUE.")
        entries.append(Entry(key, text, option))
    return entries


def validate_key(key: str, place: str) -> None:
    """Raise WorkbookError, with the nearest known key, if there is no such key."""
    if key not in KEYS:
        near = difflib.get_close_matches(re.sub(r"\W", "_", key.lower()), KEYS, n=1)
        help_ = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}."
        raise WorkbookError(f"{place}: there is no key {key[:40]!r}; {help_}")


def kinds_of(hint: Any) -> list[Any]:
    """Return the types and constants of a union or Literal, text as the last one."""
    if get_args(hint):
        return sorted(
            (kind for part in get_args(hint) for kind in kinds_of(part)), key=lambda kind: kind is str
        )
    return [type(None) if hint is None else hint]


def read_as(text: str, kind: Any) -> tuple[Any] | None:
    """Return the text as a bool, int, float, str, None or as the constant `kind`; None if it is none."""
    if kind is bool and text.lower() in ("true", "yes", "on", "false", "no", "off"):
        return (text.lower() in ("true", "yes", "on"),)
    if kind is int and re.fullmatch(r"-?(0|[1-9]\d{0,99})", text):
        return (int(text),)
    if kind is float and re.fullmatch(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return (float(text),)
    if kind is str and text.strip() and text.isprintable():
        return (text,)
    if kind is type(None) and text in ("", "None", "none", "null", "~"):
        return (None,)
    return (kind,) if not isinstance(kind, type) and text == str(kind) else None


def allowed(hint: Any) -> str:
    """Return the allowed values as a phrase: "True, False or an integer"."""
    names = {int: "an integer", float: "a number", str: "a line of text", type(None): "None"}
    found: list[str] = []
    for kind in kinds_of(hint):
        found += ["True", "False"] if kind is bool else [names.get(kind) or str(kind)]
    return " or ".join(filter(None, [", ".join(found[:-1]), found[-1]]))


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
