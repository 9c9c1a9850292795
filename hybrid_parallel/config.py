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
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from comm.script import command_line
from comm.wire import slow_link
from hybrid_parallel.arguments import HybridArgs, model_of, refuse_options, sizes_of
from hybrid_parallel.config_file import allowed
from hybrid_parallel.mesh import AXES
from hybrid_parallel.settings import KEYS, OPTIONS, Settings
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.launch.errors import WorkbookError
from training.validate import MAX_BATCH, validate_arguments

BATCH_SIZE = 8  # examples per device
MAX_PROCESSES = 1 << 20
Choose = Callable[[HybridArgs, int, Mapping[str, Any]], ParallelSizes]
"""Returns the planner's choice for (arguments, number of processes, sizes that are given and must stay)."""


@dataclasses.dataclass(frozen=True)
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
    options = {
        name: value for name, value in settings.values.items() if name in OPTIONS and value is not None
    }
    _refuse_small_axes(settings, options)
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
        _validate_options(args)
        if auto and _has_plan(args, number, given) and choose is not None:
            args = dataclasses.replace(args, **dataclasses.asdict(choose(args, number, given)))
        if not auto or choose is not None:
            refuse_sizes(sizes_of(args, number), model_of(args), args.batch_size, number, args.experts)
    except WorkbookError as error:
        raise settings.blame(error) from error
    return Config(args, number, auto, given)


def read_command_line(words: Sequence[str], world_size: int, choose: Choose | None = None) -> HybridArgs:
    """Return the arguments of train_hybrid.py: from --config and changes of its keys, or from options."""
    path, overrides = split_config(words)
    if path is None or "--help" in words or "-h" in words:
        return command_line(HybridArgs)
    config = load(path, overrides, choose)
    validate_world_size(config, world_size)
    return config.args


def validate_world_size(config: Config, world_size: int) -> None:
    """Raise WorkbookError unless as many processes have started as the configuration asks for."""
    if config.num_processes != world_size:
        raise WorkbookError(
            f"num_gpus is {config.num_processes}, but {world_size} processes have started; start them with "
            f"scripts/launch_training.sh, or give --num_gpus {world_size} too."
        )


def _validate_options(args: HybridArgs) -> None:
    """Refuse what no training can run with, whatever the sizes."""
    validate_arguments(args, args.data or 1, args.model)
    if args.link is not None:
        slow_link.parse(args.link)
    refuse_options(args)
    model_of(args)


def _refuse_small_axes(settings: Settings, options: Mapping[str, Any]) -> None:
    for axis in AXES:
        size = options.get(axis, 1)
        if size is not False and size < 1:
            raise settings.error(f"{axis} is {size}; it must be at least 1.", axis)


def _without_open_sizes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the planner: True lets it choose, and False is a size of 1, or no ZeRO."""
    off = {"pipeline": 1, "zero": 0}
    kept = {name: value for name, value in options.items() if not (name in off and value is True)}
    return {name: off[name] if name in off and value is False else value for name, value in kept.items()}


def _with_all_sizes(
    settings: Settings, options: Mapping[str, Any], number: int, batch_size: int
) -> dict[str, Any]:
    """Return the options with all sizes. Raise WorkbookError if no product of the axes can be `number`."""
    tensor, context = options.get("tensor", 1), options.get("context", 1)
    data, pipeline = options.get("data"), options.get("pipeline", 1)
    if pipeline is True:
        pipeline = _num_stages(settings, tensor * context, data, number)
    pipeline = int(pipeline) or 1  # False is 1
    others = pipeline * context * tensor * (data or 1)
    if number % others or (data is not None and others != number):
        wanted = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}
        raise settings.blame(WorkbookError(_product(wanted, number)))
    zero = options.get("zero", 0)
    zero = (1 if pipeline > 1 else 2) if zero is True else int(zero)
    sizes = {"pipeline": pipeline, "data": data or number // others, "tensor": tensor, "zero": zero}
    return {"microbatches": _microbatches(batch_size, pipeline)} | dict(options) | sizes


def _product(sizes: Mapping[str, Any], number: int) -> str:
    axes = [axis for axis in AXES if axis != "context" or sizes.get(axis, 1) != 1]
    shown = " x ".join(f"{sizes.get(axis) or '?'} ({axis})" for axis in axes)
    return f"{number} processes cannot be {shown}; the product of the axes must be num_gpus."


def _num_stages(settings: Settings, others: int, data: int | None, number: int) -> int:
    """Return the pipeline's size for `True`: what `data` leaves, or without it the least divisor above 1.

    `others` is the number of ranks along the context and tensor axes together.
    """
    left = number // (others * (data or 1))
    if left < 2:
        raise settings.error(
            "pipeline_parallelism is True, but there is no process for a second stage; give it False, or "
            "a larger num_gpus.",
            *("pipeline", "num_gpus", "data", "context", "tensor"),
        )
    return left if data is not None else next(n for n in range(2, left + 1) if left % n == 0)


def _has_plan(args: HybridArgs, number: int, given: Mapping[str, Any]) -> bool:
    """Return True if a division of the processes that has the given sizes makes sense, else raise why not."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    first = None
    for context, pipeline, tensor in itertools.product(divisors, divisors, divisors):
        others = pipeline * context * tensor
        axes = {"pipeline": pipeline, "context": context, "tensor": tensor, "data": number // others}
        if number % others or any(given.get(axis, n) != n for axis, n in axes.items()):
            continue
        try:
            sizes = sizes_of(dataclasses.replace(args, **axes), number)
            refuse_sizes(sizes, model_of(args), args.batch_size, number, args.experts)
            return True
        except WorkbookError as error:
            first = first or error
    raise first or WorkbookError(_product(given, number))


def _microbatches(batch_size: int, pipeline: int) -> int:
    """Return how many microbatches a replica takes by default: in a pipeline about four for each stage."""
    most = min(batch_size, 4 * pipeline if pipeline > 1 else 1)
    return next(n for n in range(most, 0, -1) if batch_size % n == 0)


def _help() -> str:
    keys = "\n".join(f"  {key:22} {allowed(hint)}" for key, hint in KEYS.items())
    return (
        "usage: python -m hybrid_parallel.config --config FILE [--key value ...]\n\n"
        f"Print the number of processes that a configuration asks for. The keys, and their values:\n{keys}"
    )


def main(words: Sequence[str]) -> int:
    """Print the number of processes, or on stderr what is wrong. Return the exit code."""
    if "--help" in words or "-h" in words:
        print(_help())
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
