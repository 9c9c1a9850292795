"""Define the arguments that all train scripts take; each script adds its own."""

import dataclasses
from typing import Annotated, Any, Literal

import torch
import tyro
from torch.optim import Optimizer

from lab.models.model import GPTConfig

NotOffered = tyro.conf.Suppress[tyro.conf.Fixed[Any]]
"""The type of an option of the base class that a script does not offer: its command line lacks it."""

Size = Literal["tiny", "small", "24heads", "8layers", "13m"]
"""The GPTs of lab/models/model.py."""

# By the name of --optimizer: its class, its options, and how many numbers it keeps for each trained number.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any], int]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}, 2),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, 1),
    "sgd": (torch.optim.SGD, {}, 0),
}

Transport = Literal["auto", "shared_memory", "sockets", "gloo"]
"""The transports of comm/wire/transport.py."""


class OtherOptions:
    """Holds the options that only some scripts have, with the values that stand for all other scripts.

    This is no dataclass, so a script offers an option only if its own class declares it again.
    """

    model: str = "gpt"  # or "baby_cnn" or "mlp", which learn digits
    layers: int | None = None  # as `size` says
    length: int | None = None  # of a sequence; as `size` says
    pattern: str | None = None
    grad_acc_steps: int = 1
    bucket_mb: float | None = None
    clip: float | None = None
    sync_every: int = 1  # steps between two rounds in which the ranks communicate
    averages_losses: bool = True  # at the end of each round; False: only after the last step
    optimizer: str = "adamw"
    bf16: bool = False  # whether the model computes in 16 bits
    experts: int = 1  # in each block
    checkpoint_every: int = 0
    checkpoint_keep: int = 1


@dataclasses.dataclass
class TrainArgs(OtherOptions):
    """Train a small GPT on the source of Python's standard library."""

    steps: int = 60
    """Number of optimizer steps. A run that continues from a checkpoint takes only those that are left."""
    batch_size: int = 24
    """Number of examples (windows of text, or images) in a step, over all ranks together. The number of ranks
    does not change what is trained."""
    size: Size = "small"
    """Size of the GPT (lab/models/model.py). Millions of parameters: tiny 0.03, small 0.8, 24heads 1.8,
    8layers 2.5, 13m 12.9."""
    lr: float = 1e-3
    """Learning rate: the factor of the optimizer's update, a number without unit."""
    seed: int = 0
    """Number from which the initial weights and the batches are drawn; the same seed gives the same run."""
    transport: Transport = "auto"
    """How messages travel, except PyTorch's own and those that a pipeline sends from stage to stage. auto:
    shared memory where two ranks can have it, else sockets. gloo: PyTorch's connections."""
    link: Annotated[str | None, tyro.conf.arg(metavar="RATE[,DELAY]")] = None
    """Slow all communication down to the speed of a link, in software: a rate (100mbit, 1gbit), or a rate and
    the delay of a message (200mbit,1ms). This needs no root, and works without containers."""
    metronome: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """Replace computing by a clock: a layer's forward takes this time, such as 20ms or 1.5s, and its backward
    twice that. Nothing is trained. Communication stays real."""
    ignore_first: int = 0
    """Do not train on the first targets of each window of text, as of a prompt: from none to this number of
    them, another number for each window. Ranks then have unequal numbers of targets that count."""
    eval_every: int = 0
    """Number of steps between two computations of the loss on held-out data. 0: only after the last step."""
    checkpoint: str | None = None
    """Folder for the checkpoint, which is written at the end, at Ctrl-C and at SIGUSR1."""
    resume: bool = False
    """Continue from the checkpoint in the folder that --checkpoint names."""
    auto_resume: bool = False
    """Continue from the checkpoint in the folder that --checkpoint names, or start at step 0 without one.
    So a cluster can run the same command again after each interruption."""
    allow_nonfinite: bool = False
    """Train on where the loss or a gradient is inf or NaN, instead of ending with a sentence."""
    trace: str | None = None
    """Folder for two pictures of the run, named after RUN_MODE and time: a .json for https://ui.perfetto.dev,
    and a .png."""
    verbose: bool = False
    """Print all rows of the report (docs/report.md), not only the most important ones."""
    json: bool = False
    """Print the report as one line of JSON at the end, on stdout; everything else goes to stderr."""

    def validate(self, world_size: int) -> None:
        """Raise WorkbookError for what a script refuses. All ranks have the same arguments then."""

    def gpt_config(self) -> GPTConfig:
        """Return the sizes of the GPT."""
        own = {"num_layers": self.layers, "block_size": self.length}
        return GPTConfig.named(self.size, **{name: size for name, size in own.items() if size is not None})

    def optimizer_class(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class of the optimizer, and its options."""
        optimizer_class, options, _ = OPTIMIZERS[self.optimizer]
        return optimizer_class, {**options, "lr": self.lr}

    @property
    def flops_dtype(self) -> torch.dtype | None:
        """Return the type of numbers in which the model computes; None if no formula counts its FLOPs."""
        if self.model != "gpt" or self.experts > 1 or self.metronome is not None:
            return None
        return torch.bfloat16 if self.bf16 else torch.float32

    def made_with(self) -> dict[str, Any]:
        """Return what must be the same for another run to go on from this one's checkpoint.

        The script, the number of ranks and how they divide the model are not among it.
        """
        config = self.gpt_config()
        sizes = {"layers": self.layers, "width": config.width}
        if self.model == "gpt":
            sizes = dataclasses.asdict(config)
        return sizes | self.chosen(
            "model", "batch_size", "lr", "seed", "metronome", "optimizer", "ignore_first"
        )

    def chosen(self, *names: str) -> dict[str, Any]:
        """Return the values of these options, without those that are None, 0 or False."""
        return {name: value for name in names if (value := getattr(self, name))}


ShardPattern = Literal["auto", "ring", "pipelined_ring", "tree", "torch"]  # they also gather
AllReducePattern = Literal[ShardPattern, "flat", "recursive_doubling", "halving_doubling", "hierarchical"]


@dataclasses.dataclass
class Args(TrainArgs):
    """Train a small GPT on the source of Python's standard library."""

    pattern: Literal[AllReducePattern, None] = None
    """Algorithm of the all-reduce: who sends what to whom. ring is the textbook's; pipelined_ring sends each
    chunk in segments; hierarchical adds up within each host first; torch is PyTorch's own; auto measures
    the link and takes the fastest by formula; the others are in comm/algorithms. Left out: ring
    with gloo, torch with nccl."""


@dataclasses.dataclass
class AccumulationArgs(Args):
    """Train a small GPT on the source of Python's standard library, in microbatches."""

    grad_acc_steps: int = 1
    """Number of microbatches in a step. Their gradients add up, and the sum is reduced once."""


@dataclasses.dataclass
class ClipArgs:
    """The option of scripts that clip gradients (training/clipping.py)."""

    clip: float | None = None
    """Scale the gradients down so that their norm, over all parameters and ranks, is at most this number."""


@dataclasses.dataclass
class ZeroArgs(ClipArgs, AccumulationArgs):
    """Train a small GPT on the source of Python's standard library, with the training state sharded."""

    optimizer: Literal["adamw", "momentum", "sgd"] = "adamw"
    """Optimizer. Its state is twice the parameters' size (adamw), the same size (momentum) or empty (sgd)."""
    pattern: Literal[ShardPattern, None] = None
    """Algorithm of the collectives: who sends what to whom. ring is the textbook's; pipelined_ring sends each
    chunk in segments; tree sends all data through rank 0; torch is PyTorch's own. Left out: ring
    with gloo, torch with nccl."""
    metronome: NotOffered = None  # a metronome runs no layer, and what layers use is sharded

    @property
    def states(self) -> int:
        """Return how many numbers the optimizer keeps for each trained number."""
        return OPTIMIZERS[self.optimizer][2]


def given(args: Any) -> dict[str, Any]:
    """Return the options, by name, that must be equal on all ranks; how a run is shown may differ."""
    values = dataclasses.asdict(args).items()
    return {f"--{name.replace('_', '-')}": value for name, value in values if name not in ("json", "verbose")}
