"""The arguments that train scripts of all lessons take; each adds its own."""

import dataclasses
from typing import Any, Literal

import tyro

NotOffered = tyro.conf.Suppress[tyro.conf.Fixed[None]]
"""The type of an option that the base class has and a script cannot honour: it is not on its command line."""


@dataclasses.dataclass
class TrainArgs:
    """Train a small GPT on the source of Python's standard library."""

    steps: int = 60
    batch_size: int = 24
    """Windows of text in a step, over all ranks: the same batch whatever their number."""
    size: Literal["tiny", "small", "13m"] = "small"
    """Of the model (lab.model)."""
    lr: float = 1e-3
    seed: int = 0
    link: str | None = None
    """Slow all communication down to a link, such as 1gbit or 200mbit,0.2ms; needs no root."""
    metronome: str | None = None
    """Replace computing by a clock: so long, such as 20ms, for a layer's forward, twice for its backward."""
    checkpoint: str | None = None
    """A folder for the checkpoint, written at the end and at Ctrl-C."""
    resume: bool = False
    """Go on from the checkpoint in that folder."""
    trace: str | None = None
    """A folder for trace.json (Perfetto) and timeline.png."""
    json: bool = False
    """Print the summary as one JSON line at the end."""


AllReducePattern = Literal[
    "pipelined_ring", "ring", "tcp", "cma", "tree", "flat", "recursive_doubling", "halving_doubling", "torch"
]


@dataclasses.dataclass
class Args(TrainArgs):
    """Train a small GPT on the source of Python's standard library."""

    pattern: AllReducePattern | None = None
    """Which all-reduce to use (comm/collectives.py): ring is the textbook's, cma the fastest on one machine
    (each rank reads its neighbour's memory), torch PyTorch's own. Without it: cma on gloo, torch on nccl."""


@dataclasses.dataclass
class AccumulationArgs(Args):
    """Train a small GPT on the source of Python's standard library, in microbatches."""

    grad_acc_steps: int = 1
    """Microbatches of a step; gradients add up over them and are reduced once."""


@dataclasses.dataclass
class ClipArgs:
    """The option of scripts that clip gradients (training/clipping.py)."""

    clip: float | None = None
    """Scale the gradients down so that their norm, over all parameters and ranks, is at most this number."""


def given(args: Any) -> dict[str, Any]:
    """Return what all ranks must be given alike, by option; only rank 0 asks for --json."""
    values = dataclasses.asdict(args).items()
    return {f"--{name.replace('_', '-')}": value for name, value in values if name != "json"}
