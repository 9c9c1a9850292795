"""Read a run's configuration: a YAML file, and the options of a command line, which override the file.

A mistake is refused in one sentence that names the key, before any process starts. The launcher calls this,
which prints the number of processes, and with --help all keys:

    python -m hybrid_parallel.config --config configs/config.yaml
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import yaml
from tyro.conf import arg

from comm.wire import slow_link
from hybrid_parallel.arguments import HybridArgs, Pattern, model_of, sizes_of
from hybrid_parallel.mesh import AXES
from hybrid_parallel.sizes import ParallelSizes, Zero, refuse_sizes
from lab.launch.errors import WorkbookError, reason
from lab.launch.usage import help_of, read_words
from training.arguments import NotOffered, Size
from training.validate import validate_arguments

SHORT_NAMES = {
    "pipeline_parallelism": "pipeline",
    "zero_redundancy": "zero",
    "communication_pattern": "pattern",
}


@dataclass
class Keys(HybridArgs):
    """The keys of a file are these options without their dashes, as in `num_gpus: 8`. The short names
    pipeline, zero and pattern are keys too."""

    num_gpus: int | None = None
    """Number of processes, on GPUs or not."""
    batch_size: int = 8
    """Number of examples per device: a step has batch_size x data, with auto batch_size x num_gpus."""
    model: Literal["transformer", Size, "gpt", "mlp"] = "gpt"  # type: ignore[assignment]
    """Model to train: a GPT of --size (transformer, gpt) or of the size that is named here, or an MLP."""
    pipeline: Annotated[
        bool | int | None,
        arg(name="pipeline_parallelism", aliases=["--pipeline"], metavar="{True,False,INT}"),
    ] = None
    """Number of stages. True: what --data leaves, or without it the fewest, at least 2, that divide the
    processes. False: 1."""
    zero: Annotated[bool | Zero, arg(name="zero_redundancy", aliases=["--zero"])] = 0  # type: ignore[assignment]
    """Number of ZeRO's stage along the data axis. True: 1 beside a pipeline, and 2 without one. False: 0."""
    pattern: Annotated[Pattern | None, arg(name="communication_pattern", aliases=["--pattern"])] = None
    """Algorithm of the collectives, or the fastest of ours as measured (auto), or PyTorch's own (torch)."""
    sharding_strategy: Literal["auto", "manual"] = "manual"
    """Take the sizes as they are written (manual), or let the planner choose those that are not (auto)."""
    config: NotOffered = None


class Config(NamedTuple):
    """Holds the arguments of a run and its number of processes. With `sharding_strategy: auto` the planner
    must keep the sizes in `given`, and choose the others; otherwise it is None."""

    args: HybridArgs
    num_processes: int
    given: dict[str, Any] | None


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a file, changed by a command line. Raise WorkbookError for a mistake."""
    try:
        words = [*words_of(path), *overrides]
        return _config(read_words(words, Keys), {option_of(word) for word in words})
    except WorkbookError as error:
        sentence = re.sub(r" [(]--help .*[)]", "", str(error)).replace(
            "?.", "?"
        )  # that is another script's help
        raise WorkbookError(f"{path}: {sentence}") from error


def _config(keys: Keys, written: set[str]) -> Config:
    number, options = keys.num_gpus, {field.name: getattr(keys, field.name) for field in fields(HybridArgs)}
    if number is None:
        raise WorkbookError("there is no num_gpus; add it, as in num_gpus: 4.")
    if keys.model in get_args(Size):
        if "size" in written and keys.size != keys.model:
            raise WorkbookError(f"model is {keys.model} and size is {keys.size}; leave one of the two out.")
        options["size"] = keys.model
    options["model"] = "mlp" if keys.model == "mlp" else "gpt"
    options |= {name: off for name, off in (("pipeline", 1), ("zero", 0)) if options[name] is False}
    for name, size in [("num_gpus", number), *((axis, options[axis]) for axis in AXES)]:
        if size is not None and size < 1:
            raise WorkbookError(f"{name} is {size}; it must be at least 1.")
    given = None
    if keys.sharding_strategy == "auto":
        is_open = {name for name in ("pipeline", "zero") if options[name] is True}  # the planner chooses
        names = {field.name for field in fields(ParallelSizes)} & written - is_open
        given = {name: options[name] for name in names if options[name] is not None}
        args = HybridArgs(**options | {"batch_size": keys.batch_size * number})
    else:
        options["pipeline"] = options["pipeline"] or 1
        if keys.pipeline is True:  # as many stages as `data` leaves, or without it the least divisor above 1
            left = number // math.prod((keys.data or 1, keys.context, keys.tensor or 1))
            divisors = (n for n in range(2, left) if left % n == 0)
            options["pipeline"] = max(2, left if keys.data else next(divisors, left))
        if keys.zero is True:
            options["zero"] = 1 if options["pipeline"] > 1 else 2
        args = HybridArgs(**options)
        args.batch_size *= sizes_of(args, number).data
        args = replace(args, **asdict(sizes_of(args, number)))
    validate_arguments(replace(args, transport="auto"), args.data or 1)  # a transport needs ranks
    if args.link is not None:
        slow_link.parse(args.link)
    args.validate(number)
    model = model_of(args)
    if given is None:
        refuse_sizes(sizes_of(args, number), model, args.batch_size, number, args.experts)
    return Config(args, number, given)


def words_of(path: str) -> list[str]:
    """Return the keys of a YAML file as options of a command line. Raise WorkbookError for a wrong file."""
    example = "write one key and its value a line, such as num_gpus: 8"
    try:
        root = yaml.compose(Path(path).read_text("utf-8-sig"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "problem", None) or reason(error)
        raise WorkbookError(f"the file cannot be read ({why}); {example}.") from error
    if not isinstance(root, yaml.MappingNode):
        raise WorkbookError(f"the file has no keys; {example}.")
    words: dict[str, str] = {}
    for key, text in ((key.value, value.value) for key, value in root.value):
        if not isinstance(key, str) or not isinstance(text, str):
            named = key if isinstance(key, str) else "a key"
            raise WorkbookError(f"{named} is a list or a mapping; {example}.")
        option, text = option_of(f"--{key}"), {"": "None", "true": "True", "false": "False"}.get(text, text)
        if option in words:
            raise WorkbookError(f"{option} is given twice; leave one of the two out.")
        words[option] = f"--{key}={text}"
        if option in [field.name for field in fields(Keys) if field.type is bool]:
            if text not in ("True", "False"):
                raise WorkbookError(f"{key} is {text!r}; it must be True or False.")
            words[option] = f"--{key}" if text == "True" else f"--no-{key}"
    return list(words.values())


def option_of(word: str) -> str:
    """Return the name of the option that a word of a command line sets: zero for --zero-redundancy=2."""
    name = re.sub("^--(no-)?|=.*", "", word).replace("-", "_")
    return SHORT_NAMES.get(name, name)


def split_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the file that --config names, if it is there, and the other words of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    found, rest = parser.parse_known_args(words)
    return found.config, rest


def main(words: Sequence[str]) -> int:
    """Print the number of processes, or on stderr what is wrong. Return the exit code."""
    if {"--help", "-h"} & set(words):
        print(help_of(Keys, "python -m hybrid_parallel.config --config FILE", every=True), end="")
        return 0
    try:
        path, overrides = split_config(words)
        if path is None:
            raise WorkbookError("There is no --config FILE, such as --config configs/config.yaml.")
        print(load(path, overrides)[1])
    except WorkbookError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
