"""Read a run's configuration: a YAML file, and the options of a command line, which override the file.

    python -m hybrid_parallel.config --config FILE    # prints the number of processes; --help prints the keys

A mistake is refused in one sentence that names the key, before any process starts.
"""

import argparse
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
from hybrid_parallel.sizes import ParallelSizes, Zero, refuse_sizes
from lab.launch.errors import WorkbookError, reason
from lab.launch.usage import help_of, read_words
from training.arguments import NotOffered, Size
from training.validate import validate_arguments


@dataclass
class Keys(HybridArgs):
    """The keys of a file are these options without their dashes, as in `num_gpus: 8`, or `pipeline: 2`."""

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
    """Number of stages. True: 2. False: 1."""
    zero: Annotated[bool | Zero, arg(name="zero_redundancy", aliases=["--zero"])] = 0  # type: ignore[assignment]
    """Number of ZeRO's stage along the data axis. True: 1 beside a pipeline, and 2 without one. False: 0."""
    pattern: Annotated[Pattern | None, arg(name="communication_pattern", aliases=["--pattern"])] = None
    """Algorithm of the collectives, or the fastest of ours as measured (auto), or PyTorch's own (torch)."""
    sharding_strategy: Literal["auto", "manual"] = "manual"
    """Take the sizes as they are written (manual), or let the planner choose those that are not (auto)."""
    config: NotOffered = None


class Config(NamedTuple):
    """Holds a run's arguments and number of processes, and with auto the sizes that the planner must keep."""

    args: HybridArgs
    num_processes: int
    given: dict[str, Any] | None


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a file, changed by a command line. Raise WorkbookError for a mistake."""
    try:
        words = [*words_of(path), *overrides]
        return _config(read_words(words, Keys), {option_of(word) for word in words})
    except WorkbookError as error:
        sentence = re.sub(r" \(--help .*", ".", str(error)).replace("?.", "?")  # of another script's help
        raise WorkbookError(f"{path}: {sentence}") from error


def _config(keys: Keys, written: set[str]) -> Config:
    number, options = keys.num_gpus, {field.name: getattr(keys, field.name) for field in fields(HybridArgs)}
    if number is None or number < 1:
        raise WorkbookError(f"num_gpus is {number}; give the number of processes, as in num_gpus: 4.")
    if keys.model in get_args(Size):
        if "size" in written and keys.size != keys.model:
            raise WorkbookError(f"model is {keys.model} and size is {keys.size}; leave one of the two out.")
        options["size"] = keys.model
    options["model"] = "mlp" if keys.model == "mlp" else "gpt"
    options |= {name: off for name, off in (("pipeline", 1), ("zero", 0)) if options[name] is False}
    if keys.sharding_strategy == "auto":
        if keys.model == "mlp" or keys.compress or keys.sync_every > 1:
            raise WorkbookError("sharding_strategy auto knows no mlp, compress or sync_every; take manual.")
        is_open = {name for name in ("pipeline", "zero") if options[name] is True}  # the planner chooses
        names = {field.name for field in fields(ParallelSizes)} & written - is_open
        given = {name: options[name] for name in names if options[name] is not None}
        args = HybridArgs(**options | {"batch_size": keys.batch_size * number})
    else:
        given, stages = None, 2 if keys.pipeline is True else options["pipeline"] or 1
        zero = (1 if stages > 1 else 2) if keys.zero is True else options["zero"]
        args = HybridArgs(**options | {"pipeline": stages, "zero": zero})
        args.batch_size *= sizes_of(args, number).data
        args = replace(args, **asdict(sizes_of(args, number)))
        refuse_sizes(sizes_of(args, number), model_of(args), args.batch_size, number, args.experts)
    validate_arguments(replace(args, transport="auto"), args.data or 1)  # a transport needs ranks
    slow_link.parse(args.link or "1gbit")
    args.validate(number)
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
    switches, words = {field.name for field in fields(Keys) if field.type is bool}, dict[str, str]()
    for key, text in ((key.value, value.value) for key, value in root.value):
        if not isinstance(text, str):
            raise WorkbookError(f"{key} is a list or a mapping; {example}.")
        option, text = option_of(f"--{key}"), {"": "None", "true": "True", "false": "False"}.get(text, text)
        if option in words:
            raise WorkbookError(f"{option} is given twice; leave one of the two out.")
        if option in switches and text not in ("True", "False"):
            raise WorkbookError(f"{key} is {text!r}; it must be True or False.")
        switch = f"--{key}" if text == "True" else f"--no-{key}"
        words[option] = switch if option in switches else f"--{key}={text}"
    return list(words.values())


def option_of(word: str) -> str:
    """Return the name of the option that a word of a command line sets: zero for --zero-redundancy=2."""
    return re.sub("^__(no_)?|=.*|_parallelism|_redundancy|communication_", "", word.replace("-", "_"))


def split_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the file that --config names, if it is there, and the other words of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    found, rest = parser.parse_known_args(words)
    return found.config, rest


def main(words: Sequence[str]) -> None:
    """Print the number of processes, or on stderr what is wrong."""
    if {"--help", "-h"} & set(words):
        print(help_of(Keys, "python -m hybrid_parallel.config --config FILE", every=True), end="")
        return
    path, overrides = split_config(words)
    try:
        print(load(path or "configs/config.yaml", overrides).num_processes)
    except WorkbookError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
