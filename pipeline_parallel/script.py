"""Give the scripts of this lesson their options, and the rows of a report about a schedule."""

import dataclasses
import re
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor, nn

import training.arguments
from comm.clocks import gather_events
from comm.exchange import exchange
from comm.patterns import measure_link
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.launch.threads import own_cores
from lab.trace import timeline
from lab.trace.makespan import figures_of
from lab.trace.memory import saved_activations
from lab.units import show_bytes, show_seconds
from pipeline_parallel.stage import Balance
from training.run import Run
from training.validate import tick_seconds

MOST = 4096  # microbatches, layers or chunks: tables of more take minutes to make and draw


@dataclasses.dataclass
class Args(training.arguments.Args):
    """Train a small GPT, cut into stages, on the source of Python's standard library."""

    microbatches: Annotated[int, tyro.conf.arg(aliases=["--grad-acc-steps"])] = 8
    """Number of equal parts of a batch, which follow each other through the stages."""
    model: Literal["gpt", "baby_cnn"] = "gpt"
    """Model to train: gpt on text, or baby_cnn on images of handwritten digits."""
    layers: int = 8
    """Number of the GPT's blocks, whatever its --size."""
    chunks = 1  # stages of a rank; no option, unless a script makes it one
    balance: Balance = "layers"
    """Give the stages about equally many layers, or parameters."""
    recompute: bool = False
    """Keep only the input of each stage, and compute the stage's forward again in the backward."""
    metronome: Annotated[str | None, tyro.conf.arg(metavar="TIME", aliases=["--pseudo-computation-time"])] = (
        None
    )
    """Replace computing by a clock: on a rank, a microbatch's forward, input gradient and weight gradient
    each take this time, such as 20ms or 0.5 (seconds). Nothing is trained. Communication stays real."""

    def __post_init__(self) -> None:
        if self.metronome is not None and re.fullmatch(r"\d+(\.\d+)?", self.metronome.strip()):
            self.metronome = f"{self.metronome.strip()}s"

    def validate(self, world_size: int) -> None:
        """Refuse numbers that no schedule can have."""
        for option in ("microbatches", "layers", "chunks"):
            if not 1 <= (number := getattr(self, option)) <= MOST:
                raise WorkbookError(f"--{option} {number}: there must be at least 1, and at most {MOST}.")
        if self.batch_size % (m := self.microbatches):
            raise WorkbookError(f"--microbatches {m} must divide --batch-size {self.batch_size}.")


def begin(cluster: Cluster, args: Args, run_mode: str) -> tuple[Run, nn.Module, dict[str, Any]]:
    """Return the run, the full model, and the options of OwnStages that the arguments give.

    Each rank has the full batch: the ranks of the first and of the last stage use it. Each makes the same
    model, and has dropout masks of its own.
    """
    run = Run(cluster, args, run_mode, share=(0, 1), stream=cluster.rank, same_weights=True)
    run.link = measure_link(device=cluster.device)
    if args.link is None:
        run.not_measured = "messages between stages are recorded as spans only with --link"
    (x, _), model = run.batch(0), run.model()
    return run, getattr(model, "model", model), {  # under the metronome the clock is a stage's, not a layer's
        "example": x[: len(x) // args.microbatches],
        "recompute": args.recompute,
        "tick": None if args.metronome is None else tick_seconds(args.metronome),
    }  # fmt: skip


def figures(
    cluster: Cluster, args: Args, pipeline: Any, x: Tensor, y: Tensor, bubble: float | None
) -> dict[str, Any]:
    """Return what the report says about the schedule, on rank 0. Lists have a value for each rank.

    All ranks call it, with the bubble by formula, or None where there is no formula. The activations are
    those of one more step, on the batch x and y, in which the memory of all that autograd saves is looked up.
    """
    timeline.stop_recording()
    actions = [event for event in timeline.recorded() if "action" in event.args]
    found, rows = figures_of(gather_events(actions), cluster.world_size), {}
    if args.metronome is None:
        pipeline.zero_grad()
        with saved_activations(lambda: [x, y, *pipeline.parameters()]) as watch:
            pipeline.step(x, y)
        found["activations_bytes"] = exchange(watch.peak_bytes)
        kept, held = map(show_bytes, found["activations_bytes"]), map(str, found["microbatches_held"])
        rows["activations"] = f"{', '.join(kept)} (of {', '.join(held)} microbatches)"
    by_formula = "" if bubble is None else f"; by formula {bubble:.0%}"
    rows["bubble"] = f"{found['bubble']:.0%} of {show_seconds(found['makespan_seconds'])}{by_formula}"
    if args.trace is not None:
        rows["compare by"] = f"python pipeline_parallel/analysis/compare.py {args.trace}"
    meaning = f"The ranks were idle for {found['bubble']:.0%} of the step"
    if args.metronome is None and cluster.world_size > (cores := len(own_cores())):
        shared = f"{cluster.world_size} ranks share {cores} cores"
        meaning += f", but {shared}: ARGS='--metronome 20ms' shows the schedule alone"
    found |= {"bubble_formula": bubble, "rows": rows, "meaning": f"{meaning}."}
    return found if cluster.is_main else {}
