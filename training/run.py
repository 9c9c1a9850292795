"""Run a training: what all train scripts share around their loops.

run = Run(cluster, args, "data_parallel_naive")
model = NaiveDataParallel(run.model())
optimizer = run.optimizer(model)
for x, y in run.batches(model, optimizer):     # this rank's slice of each step's global batch
    ...                                        # the technique: this is timed, and what it sends is counted
    run.record(loss)                           # averaged over the ranks after the step
run.finish(model, traffic=model.traffic())     # the report compares the formula with what was counted

Between two steps `batches` does what each training needs: it averages the loss, evaluates (--eval-every),
saves, and ends after Ctrl-C (--checkpoint). Before the first one it resumes (--resume), and attaches what
records the spans (lab/trace/observer.py).

A model that divides something among ranks has what Run needs as methods of its own. All ranks call them
together; a plain module needs none of them.

    full_state_dict()                 the state as one process has it, on every rank
    load_full_state_dict(state)       takes this rank's part of such a state
    state_shards(optimizer)           what this rank holds of each full tensor (training/state_shards.py)
    evaluation_sums(x, y, counts)     the sums over what this rank counts of a held-out batch; None if another
                                      rank counts it (training/evaluation.py)
    observed()                        the modules whose forwards and backwards are recorded, if not itself
    mean_loss(loss)                   the step's loss, if it is not the mean over all ranks that have one
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from comm.collectives import default_pattern, use_pattern
from comm.cost import Link
from comm.same_start import check_same_start
from comm.wire import slow_link
from comm.wire.transport import use_transport
from lab.check import refuse_unequal
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, MLP, BabyCNN, MLPConfig
from lab.models.text import rank_slice
from lab.trace import timeline
from lab.trace.ledger import Entry, Traffic
from lab.trace.meter import Meter, StepRecord
from lab.trace.metronome import metronome_of
from lab.trace.observer import observe_module, observe_optimizer
from training import report
from training.arguments import TrainArgs, given
from training.calibrate import measure_all_reduce, measure_flops
from training.data import TrainingData, seed_step
from training.evaluation import Evaluation, mean_of_losses
from training.finite import CURE, refuse_not_finite
from training.predict import predicted_seconds
from training.resuming import Resuming
from training.valid_targets import count_valid, valid_targets
from training.validate import tick_seconds, validate_arguments, validate_folder

RECORDED_STEPS = 200  # of which the spans are recorded; a long run must not fill the memory with them


class Run:
    """One rank's side of a training run.

    `share` (i, n): this rank trains on the i-th of n equal parts of each batch; None: its rank's part.
    `stream` is the number of the random stream from which it draws dropout masks; None: i. Ranks get
    different initial weights, so that a missing broadcast shows, or the same ones with `same_weights`.

    What a script adds to the options of all scripts, its Args declare (arguments.py). Set `not_measured` to a
    reason where spans cannot tell what was computed while something was sent: the report then leaves these
    figures out. Set `link` to have its alpha and beta in the report instead of those of an all-reduce.
    """

    not_measured: str | None = None
    link: Link | None = None
    num_targets = 0.0  # of this step: the mean over ranks of the valid targets (valid_targets.py)
    own_targets = 0  # of this step: the valid targets of this rank, counted before they are on a GPU

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
        self._share = (cluster.rank, cluster.world_size) if share is None else share
        self._is_data_parallel = share is None
        self._stream = self._share[0] if stream is None else stream
        self._seed = args.seed + (0 if same_weights else cluster.rank)  # of the initial weights
        self._config = args.gpt_config()  # of other models, only the width counts
        self._data = TrainingData(
            args.model, args.batch_size, args.seed, self._config.block_size, args.ignore_first
        )
        # This comes first: after it all ranks have equal arguments, so all refuse what is refused below.
        check_same_start(self._data.everything, {"RUN_MODE": run_mode} | given(args))
        args.validate(cluster.world_size)
        validate_arguments(args, self._share[1])
        if args.trace is not None:
            validate_folder(cluster, "--trace", args.trace)
        tied = {"head.weight": "token_embedding.weight"} if self._data.is_text and self._config.tied else {}
        self._resuming = Resuming(cluster, args, {"made_with": args.made_with(), "tied": tied})
        self._tick = None if args.metronome is None else tick_seconds(args.metronome)
        use_transport(args.transport)
        slow_link.use(None if args.link is None else slow_link.parse(args.link))
        use_pattern(args.pattern)
        self.pattern = args.pattern or default_pattern("all_reduce")
        self._expected = Traffic()
        self._evaluation = Evaluation(self._data, self._own_slice, cluster.device, self.pattern)
        self._meter: Meter | None = None
        self._until_reported = ExitStack()
        self._record = StepRecord()

    def model(self) -> Any:
        """Return a model with different weights on each rank; the script's wrapper has to make them equal."""
        device = self._cluster.device
        if self._args.model == "baby_cnn":
            return BabyCNN(seed=self._seed).to(device)
        if self._args.model == "mlp":
            shape = MLPConfig(self._args.layers or 8, self._config.width)
            return MLP(shape.sizes, seed=self._seed).to(device)
        gpt = GPT(self._config, seed=self._seed).to(device)
        return gpt if self._tick is None else metronome_of(gpt, self._tick)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of --optimizer, or AdamW; under the metronome one that takes no time."""
        if self._tick is not None:
            return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
        optimizer_class, options = self._args.optimizer_class()
        return optimizer_class(model.parameters(), **options)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's slice (x, y) of the global batch, which is a pure function of seed and step."""
        x, y = (rank_slice(part, *self._share) for part in self._data.batch(step))
        self.own_targets = count_valid(y)
        return x.to(self._cluster.device), y.to(self._cluster.device)

    def _own_slice(self, batch: Tensor) -> Tensor:
        return rank_slice(batch, *self._share).to(self._cluster.device)

    def batches(self, model: Any, optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's slice (x, y) of each step's global batch; what the loop does with it is a step.

        With --checkpoint one is saved at the end, and after Ctrl-C, which ends all ranks after the same step.
        After `break` or an error nothing is saved.
        """
        with ExitStack() as during:
            for handle in self._observe(model, optimizer):
                during.callback(handle.remove)
            during.enter_context(self._resuming.begin(model, optimizer))
            meter = self._begin()
            for step in range(self._resuming.first_step, self._args.steps):
                x, y = self._next_batch(step)
                with meter.step(partial(self._mean_loss, model)) as self._record:
                    yield x, y
                self._record = StepRecord()  # frees the graph of the loss
                timeline.settle()
                self._evaluate(step + 1, model)
                self._resuming.save_if_due(step + 1)
            # A launcher may pass a Ctrl-C of the last step on a moment later: the report survives that.
            self._until_reported = during.pop_all()

    def _next_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step, and set what belongs to it: random numbers, the number of targets."""
        x, y = self.batch(step)
        seed_step(self._args.seed, step, self._stream)
        # Without --ignore-first all targets are valid on all ranks, and nothing has to be sent.
        self.num_targets = valid_targets(y, pattern=self.pattern) if self._args.ignore_first else y.numel()
        if self._steps_done == RECORDED_STEPS:
            timeline.stop_recording()
        return x, y

    def record(self, loss: Tensor | None, traffic: Traffic | None = None) -> None:
        """Give this step's loss to the report: the loss on this rank, or None where other ranks have it.

        `traffic` is what this rank should send in this step by the script's formula, where that differs from
        step to step; else give it to `finish`.
        """
        self._record.loss = loss  # meter.py detaches it later: detach() here would let another thread run
        self._expected += traffic or Traffic()

    def _observe(self, model: Any, optimizer: Optimizer) -> list[Any]:
        """Attach the search for gradients that are not finite, and what records the spans."""
        handles = observe_optimizer(optimizer)
        for module, describe in getattr(model, "observed", lambda: [(model, None)])():
            handles += observe_module(module, describe)

        def before_a_step(stepping: Optimizer, *_: Any) -> None:
            # ZeRO's `step` takes the mean over ranks, and an inner optimizer then trains the same groups.
            if stepping.param_groups is optimizer.param_groups:
                with self._resuming.completed_save():
                    refuse_not_finite(model, optimizer, self.current_step, self._cluster.rank)

        if not self._args.allow_nonfinite:
            handles.append(register_optimizer_step_pre_hook(before_a_step))
        return handles

    def _begin(self) -> Meter:
        if self.link is None:
            self.link = measure_all_reduce(self.pattern, device=self._cluster.device)
        if (dtype := self._args.flops_dtype) is not None:
            self._peak_flops = measure_flops(self._cluster.device, dtype)
        timeline.start_recording(self._cluster.device)
        run = self._cluster, self._run_mode, self._args.steps, self._data.tokens_per_step
        how = report.WARMUP_STEPS, self._resuming.first_step, "tokens" if self._data.is_text else "images"
        self._meter = Meter(*run, self._args.json, *how, self._args.sync_every)
        return self._meter

    @property
    def _steps_done(self) -> int:
        return len(self._meter.windows) if self._meter is not None else 0

    @property
    def current_step(self) -> int:
        """Return the number of the step that is running; the first one is 1."""
        return self._resuming.first_step + self._steps_done + 1

    def _communicates(self, done: int) -> bool:
        """Return whether the ranks communicate at the end of this step."""
        return done % self._args.sync_every == 0 or done == self._args.steps

    def _mean_loss(self, model: Any, loss: Any) -> Tensor | None:
        """Return the mean over the ranks that have a loss; in a round of local SGD its own."""
        if self._tick is not None:
            return None  # the metronome computes nothing
        done, is_alone = self.current_step - 1, not self._args.averages_losses
        if not self._communicates(done) or (is_alone and done < self._args.steps):
            return loss
        if loss is not None and hasattr(model, "mean_loss"):
            mean = model.mean_loss(loss)
        else:
            mean = mean_of_losses(loss, self._cluster.device, self.pattern)
        if not self._args.allow_nonfinite and not mean.isfinite():
            with self._resuming.completed_save():
                raise WorkbookError(f"The loss is {mean.item()}. {CURE}")
        return mean

    @property
    def traffic(self) -> dict[Entry, Traffic]:
        """Return what this rank has sent in the steps so far, without headers and the losses' mean."""
        return {} if self._meter is None else self._meter.traffic

    def _evaluate(self, done: int, model: nn.Module) -> None:
        """Evaluate after every --eval-every steps and after the last; with the metronome there is nothing."""
        args = self._args
        is_due = done == args.steps or (args.eval_every and done % args.eval_every == 0)
        if is_due and self._tick is None:
            loss = self._evaluation.measure(model)
            if done < args.steps and self._meter is not None:
                self._meter.note(f"step {done}/{args.steps}  validation loss {loss:.4f}")

    def finish(
        self,
        model: nn.Module,
        traffic: Traffic | None = None,
        rows: Mapping[str, str] | None = None,
        meaning: str | None = None,
        **extras: Any,
    ) -> dict[str, Any]:
        """Print the report, write the trace, check the replicas; all ranks must call it.

        `traffic` is what this rank should send, by the script's formula, in a step that communicates: in each
        `sync_every`-th step (by default each step) and in the last. `extras` are the script's own figures;
        the short report has what `rows` and `meaning` say: texts by their names, and a sentence.

        Raise WorkbookError at the end, on all ranks, if their models are not bitwise equal.

        The figures that come from spans (compute, communication, what is hidden, the prediction) are medians
        over `observed_steps` steps: the first ones after the warm-up. The others are for the whole run.
        """
        with self._until_reported:
            return self._report(model, traffic or Traffic(), extras, rows=rows, meaning=meaning)

    def _report(
        self, model: nn.Module, traffic: Traffic, extras: dict[str, Any], **words: Any
    ) -> dict[str, Any]:
        cluster, args, meter, link = self._cluster, self._args, self._meter, self.link
        assert meter is not None and link is not None, "there was no step"
        timeline.stop_recording()
        done = range(self._resuming.first_step + 1, self.current_step)
        expected = self._expected + traffic * sum(map(self._communicates, done))
        warmup = min(report.WARMUP_STEPS, len(meter.windows) // 2)
        steps = report.spans_of(meter.windows[warmup:RECORDED_STEPS]) if self.not_measured is None else []
        if self.not_measured is not None:
            extras |= {"not_measured": f"compute, communication, hidden share: {self.not_measured}"}
        if self._tick is not None:
            extras |= {"metronome": f"{args.metronome}: a clock replaces computing, so there is no loss"}
        if self._is_data_parallel and args.sync_every == 1:
            predicted = predicted_seconds(steps, meter.traffic, self.pattern, cluster.world_size, link)
            extras |= {"predicted_step_seconds": predicted}
        digests = report.replica_digests(cluster, model)
        summary = meter.finish(
            **report.pattern_and_transport(meter.traffic, self.pattern),
            observed_steps=len(steps),
            **report.overlap_figures(steps),
            alpha_seconds=link.alpha,
            beta_seconds_per_byte=link.beta,
            bytes_formula=expected.bytes_sent,
            messages_formula=expected.messages_sent,
            **self._evaluation.figures,
            replicas_equal=len(set(digests)) == 1,
            replica_digest=digests[cluster.rank][:16],
            **extras,
        )
        if (dtype := args.flops_dtype) is not None:
            # Other programs only make the device's peak less.
            peak = max(self._peak_flops, measure_flops(cluster.device, dtype))
            summary["mfu"] = summary["tokens_per_second"] * self._config.flops_per_token / peak
        report.print_report(cluster, summary, args.json, args.verbose, **words)
        if args.trace is not None:
            report.draw_trace(cluster, self._run_mode, args.trace, meter.windows, args.json)
        refuse_unequal(digests)
        return summary
