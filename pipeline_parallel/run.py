"""Add to training/run.py what pipeline scripts share: stages, checkpoints by name, figures of a schedule."""

import dataclasses
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor, nn

import training.arguments
import training.run
from comm.cost import Link
from comm.exchange import exchange, on_all
from comm.point_to_point import measure_link
from comm.wire import slow_link
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, BabyCNN, loss_of
from lab.trace import timeline
from lab.trace.chrome_trace import write_chrome_trace
from lab.trace.gantt import Event, draw_panels
from lab.trace.meter import StepRecord
from lab.trace.overlap import per_step
from pipeline_parallel.actions import Table
from pipeline_parallel.activations import ActivationWatch
from pipeline_parallel.analysis import from_events
from pipeline_parallel.analysis.page import write_page
from pipeline_parallel.analysis.validate import validate
from pipeline_parallel.by_hand import HandWritten
from pipeline_parallel.executor import Outcome
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.report import RankFigures, Report
from pipeline_parallel.schedules import table_of
from training.arguments import TrainArgs
from training.full_state_checkpoint import FullState
from training.run import RECORDED_STEPS, WARMUP_STEPS

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
    balance: Literal["layers", "parameters", "time"] = "layers"
    """Give the stages about equally many layers or parameters, or layers that take equally long on rank 0."""
    recompute: bool = False
    """Keep only the input of each stage, and compute the stage's forward again in the backward."""
    metronome: Annotated[str | None, tyro.conf.arg(aliases=["--pseudo-computation-time"])] = None
    """Replace computing by a clock: on a rank, a microbatch's forward, input gradient and weight gradient
    each take this time, such as 20ms or 0.5 (seconds). Nothing is trained. Communication stays real."""

    def __post_init__(self) -> None:
        if self.metronome is not None and re.fullmatch(r"\d+(\.\d+)?", self.metronome.strip()):
            self.metronome = f"{self.metronome.strip()}s"


@dataclasses.dataclass
class ChunkedArgs(Args):
    """Train a small GPT, cut into several stages per rank, on the source of Python's standard library."""

    chunks: int = 2
    """Number of stages that each rank has."""


class Run(training.run.Run):
    """Runs one rank's side of a training. Each rank has the full batch; the first and last stage use it."""

    def __init__(self, cluster: Cluster, args: Args, run_mode: str) -> None:
        super().__init__(cluster, args, run_mode, args.model, whole_batch=True)
        self._stream = cluster.rank  # a rank's layers need dropout masks of their own
        if args.link is None:
            self.not_measured = "messages between stages are recorded as spans only with --link"
        self._args: Args = args
        self._config = dataclasses.replace(self._config, num_layers=args.layers)

    def _validate(self, args: TrainArgs) -> None:
        assert isinstance(args, Args)
        for option in ("microbatches", "layers", "chunks"):
            if (number := getattr(args, option, 1)) < 1:
                raise WorkbookError(f"--{option} {number}: there must be at least one.")
            if number > MOST:
                raise WorkbookError(f"--{option} {number}: there can be at most {MOST}.")
        if args.batch_size % args.microbatches:
            raise WorkbookError(
                f"--microbatches {args.microbatches} must divide --batch-size {args.batch_size}."
            )
        super()._validate(args)

    def _measured_link(self) -> Link:
        if self._cluster.world_size == 1:
            return Link(0.0, 0.0)
        return measure_link(device=self._cluster.device)

    def model(self) -> nn.Module:
        """Return the full model, the same on each rank, because the ranks' stages are parts of one model."""
        seed = self._args.seed
        model = GPT(self._config, seed=seed) if self._args.model == "gpt" else BabyCNN(seed=seed)
        return model.to(self._cluster.device)

    def by_hand(self, lesson: Callable[..., HandWritten], schedule: str) -> Pipeline:
        """Return this rank's stage of the model, which the lesson's own `step` runs.

        `schedule` names the table of what that step does, for the simulation and the formulas of the report.
        """
        table = table_of(schedule, self._cluster.world_size, self._args.microbatches)
        return self.pipeline(table, schedule, lesson)

    def pipeline(
        self, table: Table, schedule: str, by_hand: Callable[..., HandWritten] | None = None
    ) -> Pipeline:
        """Return the stages of this rank. `schedule` is the name of `table` in the formulas (theory.py)."""
        validate(table)
        args, model = self._args, self.model()
        x, _ = self.batch(0)
        example = x[: len(x) // args.microbatches]
        self._pipeline = Pipeline(
            model,
            table,
            loss_of,
            example,
            costs=None if args.balance == "layers" else args.balance,
            recompute=args.recompute,
            tick=self._tick,
            by_hand=by_hand,
        )
        self._schedule, self._watch = schedule, ActivationWatch()
        self._watch.ignore(self._pipeline.parameters())
        return self._pipeline

    def step(self) -> AbstractContextManager[StepRecord]:
        """Time one step. Watch the activations in the first one, whose time is not reported."""
        if hasattr(self, "_pipeline"):
            self._pipeline.executor.watch = None if self._steps_done else self._watch
        return super().step()

    def loss(self, outcome: Outcome) -> Tensor:
        """Return the batch's loss, on all ranks. The last stage's rank has it, and the others add zero."""
        nothing = torch.zeros((), device=self._cluster.device)
        return self.mean_loss(nothing if outcome.loss is None else outcome.loss * self._cluster.world_size)

    def finish(self, model: nn.Module, **extras: Any) -> dict[str, Any]:
        """Report the full model, put together from the stages. All ranks must call it."""
        assert isinstance(model, Pipeline)
        timeline.stop_recording()
        whole = self.model()
        whole.load_state_dict(model.full_state_dict())
        self._report_of_ranks = self._reported(model)
        figures = self._report_of_ranks.figures() if self._report_of_ranks else {}
        return super().finish(whole, **figures, **extras)

    def _reported(self, pipeline: Pipeline) -> Report | None:
        """Return, on rank 0, the report on the actions and activations of all ranks."""
        assert self._meter is not None
        windows = self._meter.windows
        warmup = min(WARMUP_STEPS, len(windows) // 2)
        steps = per_step(timeline.recorded(), windows[warmup:RECORDED_STEPS])
        mine = [
            event._replace(args={**event.args, "step": number})
            for number, events in enumerate(steps)
            for event in events
            if "action" in event.args
        ]
        boundaries = {boundary: like.nbytes for boundary, like in pipeline.boundaries.items()}
        seen = [
            RankFigures(*one)
            for one in on_all("report", lambda: tuple(RankFigures.of(self._watch, boundaries)))
        ]
        events = timeline.gather_events(self._cluster, timeline.align(self._cluster), mine)
        if events is None:
            return None
        link = slow_link.current() or self._link
        return Report(self._schedule, pipeline.table, events, seen, link, self._tick)

    def _draw(self, folder: str, events: list[Event]) -> None:
        """Write the trace of some steps; draw one, measured above simulated, as a picture and in a page."""
        cluster = self._cluster
        everyones = timeline.gather_events(cluster, timeline.align(cluster), events)
        if everyones is None or self._report_of_ranks is None:
            return
        write_chrome_trace(Path(folder) / "trace.json", everyones)
        panels = {
            "measured": from_events.median_step(self._report_of_ranks.steps),
            "simulated": self._report_of_ranks.simulation.events(),
        }
        title = f"{self._run_mode}, {cluster.world_size} ranks, {self._args.microbatches} microbatches"
        draw_panels(panels, Path(folder) / "timeline.png", title)
        write_page(Path(folder) / "schedules.html", measured={self._schedule: panels["measured"]})

    def outputs(self, model: nn.Module, x: Tensor) -> Tensor | None:
        """Return the outputs, on the rank of the last stage."""
        assert isinstance(model, Pipeline)
        return model.forward_only(x)

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> FullState:
        """Return the full model's state, and the optimizer's by parameter name, which fit any schedule."""
        assert isinstance(model, Pipeline)
        own = model.named_own_parameters()

        def get() -> dict[str, Any]:
            mine = {name: optimizer.state[p] for name, p in own.items() if p in optimizer.state}
            by_name: dict[str, Any] = {}
            for of_rank in exchange(mine):
                by_name |= of_rank
            return {"model": model.full_state_dict(), "optimizer": by_name}

        def put(state: dict[str, Any]) -> None:
            model.load_full_state_dict(state["model"])
            names = {parameter: name for name, parameter in own.items()}
            order = [names.get(p) for group in optimizer.param_groups for p in group["params"]]
            by_name = state["optimizer"]
            known = {i: by_name[name] for i, name in enumerate(order) if name in by_name}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": known})

        return FullState(get, put)

    def _made_with(self) -> dict[str, Any]:
        """Let any schedule, on any number of ranks, go on from a checkpoint."""
        return super()._made_with() | {"run_mode": "pipeline", "layers": self._args.layers}
