"""Run a training: what the scripts of all lessons share around their loops.

run = Run(cluster, args, "data_parallel_overlap")
model = OverlapDataParallel(run.model(), pattern=run.pattern)
optimizer = run.optimizer(model)
with run.checkpointing(model, optimizer) as first:    # 0, or the step that --resume continues with
    for step in range(first, args.steps):
        x, y = run.batch(step)                        # this rank's slice of the global batch
        with run.step() as record:                    # timed; the bytes sent here are counted
            ...                                       # the lesson
            record.loss = run.mean_loss(loss)
        run.expect_traffic(formula)                   # the report shows it beside the counted bytes
        run.evaluate(step, model)                     # on held-out data: --eval-every, and after the last
        run.stop_if_asked(step)                       # with --checkpoint, all ranks end after one Ctrl-C
run.finish(model)

A model that divides something among ranks has what Run needs as methods of its own. All ranks call them
together; a plain module needs none of them.

    full_state_dict()                 the state as one process has it, on every rank
    load_full_state_dict(state)       takes this rank's part of such a state
    shards(optimizer)                 what this rank holds of each full tensor (training/checkpoint.py)
    evaluation_sums(x, y, counts)     the sums over what this rank counts of a held-out batch; None if another
                                      rank counts it (training/evaluation.py)
"""

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comm import cost
from comm.clocks import gather_events
from comm.collectives import all_reduce, default_pattern, pattern_for
from comm.cost import Link, expected_traffic
from comm.exchange import on_main
from comm.same_start import check_same_start
from comm.transport import choice
from comm.wire import slow_link
from lab.check import refuse_unequal
from lab.cluster import Cluster
from lab.launch.errors import Complete, Stopped, WorkbookError
from lab.launch.interrupt import StopRequest
from lab.launch.launcher import restart_count
from lab.models.model import GPT, MLP, BabyCNN, GPTConfig, MLPConfig
from lab.models.text import rank_slice
from lab.trace import timeline
from lab.trace.gantt import Event, draw
from lab.trace.ledger import LEDGER, Entry, Traffic
from lab.trace.meter import Meter, StepRecord
from lab.trace.metronome import metronome_of
from lab.trace.overlap import per_step
from training.arguments import TrainArgs, given
from training.calibrate import LARGE_BYTES, measure_all_reduce, measure_flops
from training.checkpoint import Checkpoints, Shard, complete_steps, create_state, plain_shards
from training.data import TrainingData, seed_step
from training.evaluation import evaluating, held_out_means, sums_of
from training.finite import CURE, gradients_by_name, not_finite
from training.predict import median_step_seconds
from training.report import overlap_figures, pattern_and_transport, print_report, replica_digests
from training.valid_targets import valid_targets
from training.validate import refuse_if, tick_seconds, validate_arguments, validate_folder

WARMUP_STEPS = 2  # neither timed nor drawn
RECORDED_STEPS = 200  # of which the spans are recorded; a long run must not fill the memory with them
DRAWN_STEPS = 3  # in a picture; more would not make it clearer

DEFAULTS = {"optimizer": "adamw", "balance": "aux"}  # of lessons that have no such option


class Run:
    """One rank's side of a training run.

    `share` (i, n): this rank trains on the i-th of n equal parts of each batch; None: its rank's part.
    `stream` is the number of the random stream from which it draws dropout masks; None: i. Ranks get
    different initial weights, so that a missing broadcast shows, or the same ones with `same_weights`.

    `args.model` is "gpt" (text; the default), "baby_cnn" or "mlp" (digits). If `args` has a method
    `validate(world_size)`, it is called once all ranks are known to have the same arguments, and may refuse
    them. Set `not_measured` to a reason where spans cannot tell what was computed while something was sent:
    the report then leaves these figures out. Set `link` to have its alpha and beta in the report instead of
    those of an all-reduce.
    """

    not_measured: str | None = None
    link: Link | None = None

    def __init__(
        self,
        cluster: Cluster,
        args: TrainArgs,
        run_mode: str,
        *,
        share: tuple[int, int] | None = None,
        stream: int | None = None,
        same_weights: bool = False,
    ) -> None:
        self._cluster, self._args, self._run_mode = cluster, args, run_mode
        self._model: str = getattr(args, "model", "gpt")
        self._share = (cluster.rank, cluster.world_size) if share is None else share
        self._stream = self._share[0] if stream is None else stream
        self._seed = args.seed + (0 if same_weights else cluster.rank)  # of the initial weights
        own = {"num_layers": getattr(args, "layers", None), "block_size": getattr(args, "length", None)}
        own = {name: size for name, size in own.items() if size is not None}
        self._config = GPTConfig.named(args.size, **own)  # of other models, only the width counts
        self._data = TrainingData(
            self._model, args.batch_size, args.seed, self._config.block_size, args.ignore_first
        )
        # This comes first: after it all ranks have equal arguments, so all refuse what is refused below.
        check_same_start(self._data.everything, {"RUN_MODE": run_mode} | given(args))
        self._validate(args)
        self._tick = None if args.metronome is None else tick_seconds(args.metronome)
        choice.use_transport(args.transport)
        self.pattern = getattr(args, "pattern", None) or default_pattern("all_reduce")
        slow_link.use(None if args.link is None else slow_link.parse(args.link))
        self._expected = Traffic()
        self._validation: dict[str, float] = {}
        self._validation_bytes = 0
        self._first_step = 0
        self._meter: Meter | None = None
        self._peak_flops: float | None = None
        self._stop_request: StopRequest | None = None
        self._until_reported = ExitStack()

    def _validate(self, args: TrainArgs) -> None:
        if hasattr(args, "validate"):
            args.validate(self._cluster.world_size)
        validate_arguments(args, self._share[1], self._model)
        if args.trace is not None:
            validate_folder(self._cluster, "--trace", args.trace)
        if args.checkpoint is not None:
            folder, keep = Path(args.checkpoint), getattr(args, "checkpoint_keep", 1)
            steps = on_main(
                self._cluster, f"look for checkpoints in {folder}", lambda: complete_steps(folder)
            )
            self._newest = max(steps, default=None)
            refuse_if(
                args.resume and not steps,
                f"There is no checkpoint in {folder} to resume from; name the directory of an earlier run, "
                "or leave out --resume.",
            )
            refuse_if(
                steps and not (args.resume or args.auto_resume),
                f"{folder} has the checkpoint of step {self._newest}, from which this run has not started: "
                "resume from it, or name another folder",
            )
            self._checkpoints = Checkpoints(folder, self._cluster, keep)

    def model(self) -> nn.Module:
        """Return a model with different weights on each rank; the lesson's wrapper has to make them equal."""
        if self._model == "baby_cnn":
            return BabyCNN(seed=self._seed).to(self._cluster.device)
        if self._model == "mlp":
            shape = MLPConfig(getattr(self._args, "layers", 8), self._config.width)
            return MLP(shape.sizes, seed=self._seed).to(self._cluster.device)
        gpt = GPT(self._config, seed=self._seed).to(self._cluster.device)
        return gpt if self._tick is None else metronome_of(gpt, self._tick)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW; under the metronome an optimizer that takes no time."""
        if self._tick is not None:
            return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
        return torch.optim.AdamW(model.parameters(), lr=self._args.lr, fused=True)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's slice (x, y) of the global batch, which is a pure function of seed and step."""
        x, y = (self._own_slice(part) for part in self._data.batch(step))
        return x, y

    def _own_slice(self, batch: Tensor) -> Tensor:
        return rank_slice(batch, *self._share).to(self._cluster.device)

    @contextmanager
    def checkpointing(self, model: Any, optimizer: torch.optim.Optimizer) -> Iterator[int]:
        """Yield the number of the first step: 0, or if the run resumes the one after the checkpoint's last.

        With --checkpoint, save one when the block ends, also when `stop_if_asked` has ended it.
        """
        if not self._args.allow_nonfinite:
            optimizer.register_step_pre_hook(lambda *_: self._stop_if_it_diverges(model, optimizer))
        if self._args.checkpoint is None:
            yield 0
            return
        self._trained = model, optimizer
        if self._newest is not None:
            self._first_step = self._load(self._newest)
        self._say_where_it_begins()
        with ExitStack() as handlers:
            self._stop_request = handlers.enter_context(StopRequest())
            try:
                yield self._first_step
            except Stopped:
                self._save()
                self._checkpoints.wait()
                raise
            self._save()
            self._checkpoints.wait()
            # A launcher may pass a Ctrl-C of the last step on a moment later: the report survives that.
            self._until_reported = handlers.pop_all()

    def _stop_if_it_diverges(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Raise WorkbookError before a step of the optimizer whose gradients are not finite."""
        if (name := not_finite(gradients_by_name(model, optimizer))) is not None:
            step = self._first_step + self._steps_done + 1
            raise WorkbookError(
                f"The gradient of {name} is not finite in step {step} on rank {self._cluster.rank}. {CURE}"
            )

    def save_if_due(self, step: int) -> None:
        """Begin to save after every --checkpoint-every steps; the training continues meanwhile."""
        every = getattr(self._args, "checkpoint_every", 0)
        if self._args.checkpoint is not None and every and (step + 1) % every == 0:
            self._save()

    def _save(self) -> None:
        is_tied = self._model == "gpt" and self._config.tied
        tied = {"head.weight": "token_embedding.weight"} if is_tied else {}
        extra = {"made_with": self._made_with(), "tied": tied}
        self._checkpoints.save(self._first_step + self._steps_done, self._shards(), extra)

    def _shards(self) -> list[Shard]:
        """Return what this rank holds: the model says it, or a sharded optimizer, or it is a plain module."""
        model, optimizer = self._trained
        if hasattr(model, "shards"):
            return model.shards(optimizer)
        if hasattr(optimizer, "shards"):
            return optimizer.shards(model)
        return plain_shards(getattr(model, "module", model), optimizer)

    def _load(self, step: int) -> int:
        """Load a checkpoint of any lesson, on any number of ranks, and return its number of steps."""
        args, (_, optimizer) = self._args, self._trained
        found, here = self._checkpoints.find(step), self._made_with()
        made_with = found.extra["made_with"]
        if made_with != here:
            raise WorkbookError(
                f"The checkpoint was made with {made_with}, and this run has {here}; give the same "
                "arguments, or another folder."
            )
        if step >= args.steps and args.auto_resume:
            raise Complete(f"{args.checkpoint} has a checkpoint of all {args.steps} steps; nothing is left.")
        if step >= args.steps:
            raise WorkbookError(f"The checkpoint has {step} steps already; ask for more with --steps.")
        create_state(optimizer, found)
        self._checkpoints.load(step, self._shards())
        for part in self._trained:
            if hasattr(part, "gather_parameters"):  # they were loaded in shards
                part.gather_parameters()
        return step

    def _say_where_it_begins(self) -> None:
        """Tell the user, on rank 0, how much of the training is kept; a new run has nothing to tell."""
        folder, steps, restarts = self._args.checkpoint, self._args.steps, restart_count()
        text = f"training starts at step 0 again: {folder} has no complete checkpoint yet."
        if first := self._first_step:
            text = f"training continues after step {first} of {steps}, from the checkpoint in {folder}."
        if self._cluster.is_main and (first or restarts):
            again = f"restart {restarts}: " if restarts else ""
            print(again + text, file=sys.stderr if self._args.json else sys.stdout, flush=True)

    @contextmanager
    def step(self) -> Iterator[StepRecord]:
        """Time one step and count what it sends. Spans are recorded in the first 200 steps."""
        if self._meter is None:
            self._meter = self._begin()
        if self._steps_done == RECORDED_STEPS:
            timeline.stop_recording()
        seed_step(self._args.seed, self._first_step + self._steps_done, self._stream)
        with self._meter.step() as record:
            yield record
            if self._tick is not None:
                record.loss = None  # the metronome computes nothing
        timeline.settle()

    def _begin(self) -> Meter:
        if self.link is None:
            self.link = measure_all_reduce(self.pattern, device=self._cluster.device)
        if self._model == "gpt" and self._tick is None and getattr(self._args, "experts", 1) == 1:
            self._peak_flops = self._measured_flops()
        timeline.start_recording(self._cluster.device)
        run = self._cluster, self._run_mode, self._args.steps, self._data.tokens_per_step
        unit = "tokens" if self._model == "gpt" else "images"
        round_steps = getattr(self._args, "sync_every", 1)
        return Meter(*run, self._args.json, WARMUP_STEPS, self._first_step, unit, round_steps)

    def _measured_flops(self) -> float:
        is_bf16 = getattr(self._args, "bf16", False) or getattr(self._args, "precision", "") == "bf16"
        return measure_flops(self._cluster.device, torch.bfloat16 if is_bf16 else torch.float32)

    @property
    def _steps_done(self) -> int:
        return len(self._meter.windows) if self._meter is not None else 0

    def valid_targets(self, targets: Tensor) -> float:
        """Return the mean over ranks of the valid targets in a step (valid_targets.py).

        Without --ignore-first all are valid on all ranks, and nothing has to be sent.
        """
        if not self._args.ignore_first:
            return targets.numel()
        self._expected += expected_traffic("all_reduce", self.pattern, 1, 8)
        return valid_targets(targets, pattern=self.pattern)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean over ranks of each one's loss."""
        mean = loss.detach().float().clone()
        all_reduce(mean, op="mean", pattern=self.pattern)
        if not self._args.allow_nonfinite and not mean.isfinite():
            raise WorkbookError(f"The loss is {mean.item()}. {CURE}")
        return mean

    def expect_traffic(self, of_the_step: Traffic, with_loss: bool = True) -> None:
        """Add what this rank should send in a step by the lesson's formula, and for the mean loss.

        Without `with_loss` the loss is not averaged in this step, or the formula has its all-reduce already.
        """
        of_loss = expected_traffic("all_reduce", self.pattern, 1, 4)
        self._expected += of_the_step + of_loss if with_loss else of_the_step

    @property
    def traffic(self) -> dict[Entry, Traffic]:
        """Return what this rank has sent in the steps so far."""
        return {} if self._meter is None else self._meter.traffic

    def evaluate(self, step: int, model: nn.Module) -> None:
        """Compute the loss on held-out data, after every --eval-every steps and after the last.

        What ranks send for it is counted separately. Under the metronome there is no evaluation.
        """
        args, done = self._args, step + 1
        is_due = done == args.steps or (args.eval_every and done % args.eval_every == 0)
        if not is_due or self._tick is not None:
            return
        batches = (map(self._own_slice, batch) for batch in self._data.held_out())
        tokens, device = self._data.held_out_tokens, self._cluster.device
        before = LEDGER.total()
        sums: Any = getattr(model, "evaluation_sums", lambda x, y, counts: sums_of(model(x), y, counts))
        with evaluating(model):
            loss, right = held_out_means(batches, sums, tokens, device, self.pattern)  # type: ignore[arg-type]
        self._validation_bytes += (LEDGER.total() - before).bytes_sent
        self._validation = {"validation_loss": loss, "validation_bytes_sent": self._validation_bytes}
        if self._model != "gpt":
            self._validation["validation_accuracy"] = right
        if done < args.steps and self._meter is not None:
            self._meter.note(f"step {done}/{args.steps}  validation loss {loss:.4f}")

    def stop_if_asked(self, step: int) -> None:
        """End the training after this step if a rank was asked to (lab/launch/interrupt.py); only with
        --checkpoint.

        Raises Stopped on all ranks: otherwise one would wait in a collective for a rank that has left.
        """
        if self._stop_request is None or step + 1 == self._args.steps:
            return
        asked = torch.tensor([self._stop_request.exit_code], dtype=torch.uint8).to(self._cluster.device)
        all_reduce(asked, op="max", pattern=self.pattern)
        if asked:
            done, where = f"step {step + 1} of {self._args.steps}", self._args.checkpoint
            sentence = f"stopped after {done}; the checkpoint is in {where}: --resume continues from there."
            raise Stopped(sentence, int(asked))

    def finish(self, model: nn.Module, **extras: Any) -> dict[str, Any]:
        """Print the report, write the trace, check the replicas; all ranks must call it.

        `extras` are the lesson's own rows. One that is a function is called with the spans of each observed
        step on this rank.

        Raise WorkbookError at the end, on all ranks, if their models are not bitwise equal.

        The figures that come from spans (compute, communication, what is hidden, the prediction) are medians
        over `observed_steps` steps: the first ones after the warm-up. The others are for the whole run.
        """
        with self._until_reported:
            return self._report(model, extras)

    def _report(self, model: nn.Module, extras: dict[str, Any]) -> dict[str, Any]:
        cluster, args = self._cluster, self._args
        assert self._meter is not None and self.link is not None, "there was no step"
        timeline.stop_recording()
        windows = self._meter.windows
        warmup = min(WARMUP_STEPS, len(windows) // 2)
        by_step = per_step(timeline.recorded(), windows[warmup:RECORDED_STEPS])
        if self.not_measured is not None:
            extras |= {"not_measured": f"compute, communication, hidden share: {self.not_measured}"}
        if self._tick is not None:
            extras |= {"metronome": f"{args.metronome}: a clock replaces computing, so there is no loss"}
        own_rows = {name: value(by_step) if callable(value) else value for name, value in extras.items()}
        digests = replica_digests(cluster, model)
        summary = self._meter.finish(
            **pattern_and_transport(self._meter.traffic, self.pattern),
            observed_steps=len(by_step),
            **overlap_figures(by_step if self.not_measured is None else []),
            alpha_seconds=self.link.alpha,
            beta_seconds_per_byte=self.link.beta,
            bytes_formula=self._expected.bytes_sent,
            messages_formula=self._expected.messages_sent,
            **self._validation,
            replicas_equal=len(set(digests)) == 1,
            replica_digest=digests[cluster.rank][:16],
            **own_rows,
        )
        if self._peak_flops is not None:
            peak = max(self._peak_flops, self._measured_flops())  # other programs only make it less
            summary["mfu"] = summary["tokens_per_second"] * self._config.flops_per_token / peak
        print_report(cluster, summary, args.json, args.verbose)
        if args.trace is not None:
            drawn = windows[WARMUP_STEPS : WARMUP_STEPS + DRAWN_STEPS] or windows
            self._draw(args.trace, [event for step in per_step(timeline.recorded(), drawn) for event in step])
        refuse_unequal(digests)
        return summary

    def _draw(self, folder: str, events: list[Event]) -> None:
        """Write the files of --trace, from this rank's events of some steps."""
        title = f"{self._run_mode}, {self._cluster.world_size} ranks"
        everyones = gather_events(events)
        name = f"{self._run_mode}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        paths = Path(folder, f"{name}.json"), Path(folder, f"{name}.png")

        def write() -> None:
            parts = [path.with_name(f".{path.name}") for path in paths]  # a full disk must leave no cut file
            try:
                timeline.write_chrome_trace(parts[0], everyones)
                draw(everyones, parts[1], title)
                for part, path in zip(parts, paths, strict=True):
                    part.replace(path)
            finally:
                for part in parts:
                    part.unlink(missing_ok=True)

        on_main(self._cluster, f"write the trace in {folder}", write)
        if self._cluster.is_main and not self._args.json:
            print(f"The trace is in {' and '.join(map(str, paths))}.")

    def predicted_seconds(self, by_step: list[list[Event]]) -> float | None:
        """Return the predicted time of a step in which gradients are all-reduced (predict.py)."""
        assert self.link is not None, "there was no step"
        pattern = cost.model_of("all_reduce", pattern_for("all_reduce", self.pattern, LARGE_BYTES))
        ranks, link = self._cluster.world_size, self.link
        return median_step_seconds(
            by_step, lambda size: cost.seconds("all_reduce", pattern, size, ranks, link)
        )

    def _made_with(self) -> dict[str, Any]:
        """Return what must be the same for another run to go on from this one's checkpoint.

        The lesson, the number of ranks and how they divide the model are not among it.
        """
        args = self._args
        config = {"layers": getattr(args, "layers", None), "width": self._config.width}
        if self._model == "gpt":
            config = dataclasses.asdict(self._config)
        names = ["batch_size", "lr", "seed", "metronome", "optimizer", "documents", "ignore_first"]
        if (getattr(args, "experts", None) or 1) > 1:
            names += ["experts", "top_k", "capacity", "aux_weight", "balance", "shared"]
        values = {name: getattr(args, name, None) or DEFAULTS.get(name) for name in names}
        return {"model": self._model} | config | {name: value for name, value in values.items() if value}
