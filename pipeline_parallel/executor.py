"""The executor: one plain loop that runs any schedule.

      table ──with_messages──► program of this rank ──► for step in program: do it

It knows nothing of 1F1B or zero bubbles; those are tables (schedules.py). A step of the program is an action
(F, B, I, W), or a message: receives are posted early, sends never block (messages.py says why this cannot
deadlock). An activation or gradient has one owner at a time: who makes it hands it over, and who uses it
lets it go.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from comm.errors import CommError
from comm.point_to_point import SlowTransfer, irecv, isend
from comm.transport.channels import Channels
from comm.transport.wire import Group, Transfer
from lab import timeline
from pipeline_parallel.actions import (
    BACKWARD,
    FORWARD,
    GANTT_KIND,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Table,
    num_microbatches,
    placement,
)
from pipeline_parallel.activations import ActivationWatch
from pipeline_parallel.batches import (
    microbatches_of_input,
    microbatches_of_targets,
    refuse_without_gradients,
)
from pipeline_parallel.failure import SharedFailure
from pipeline_parallel.messages import (
    Message,
    Receive,
    Send,
    Step,
    WaitForSend,
    neighbours,
    received_by,
    sent_by,
    with_messages,
)
from pipeline_parallel.schedules import forward_only
from pipeline_parallel.stage_runner import StageRunner


class Outcome(NamedTuple):
    """What a step leaves on this rank, besides gradients in the parameters.

    `loss`: the mean over the batch, on the last stage's rank. `input_gradient`: the gradient of `x`, on the
    first stage's, if `x` wants one.
    """

    loss: Tensor | None
    input_gradient: Tensor | None


class Executor:
    """Runs `table` on the ranks of `group`: row r on rank r.

    `runners` are this rank's stages by number, and `boundaries` what each stage gets as its input, as tensors
    without memory (Pipeline makes them): a gradient has the shape of the activation it is for. `rows` are the
    examples of a microbatch. `apart` is Channels'.
    """

    def __init__(
        self,
        table: Table,
        runners: Mapping[int, StageRunner],
        boundaries: Mapping[int, Tensor],
        rank: int,
        group: Group = None,
        device: torch.device | str = "cpu",
        apart: bool | None = None,
        rows: int | None = None,
    ) -> None:
        self.runners, self.device, self._rows = runners, device, rows
        self.microbatches = num_microbatches(table)
        self.last_stage = max(placement(table))
        self.watch: ActivationWatch | None = None
        self._chunk_of = {stage: chunk for chunk, stage in enumerate(sorted(runners))}
        self._boundaries = boundaries
        programs = with_messages(table)
        self._rank, self._program = rank, programs[rank]
        self._forwards = with_messages(forward_only(table))[rank]
        self._channels = Channels(group, neighbours(programs), apart)
        self._failure = SharedFailure(group, device)
        self._here: dict[Message, Tensor] = {}
        self._arriving: dict[Message, tuple[Tensor, Transfer | SlowTransfer]] = {}
        self._leaving: dict[Message, Transfer | SlowTransfer] = {}

    def step(
        self, x: Tensor | None = None, y: Tensor | None = None, check: Callable[[], None] | None = None
    ) -> Outcome:
        """Do the forward and the backward of all microbatches; add the gradients to the parameters'.

        `x` is the full batch, for the rank of the first stage, and `y` the targets, for the last one's.
        What goes wrong on one rank, a batch that does not fit or an error in a stage, raises on all of them;
        so does what `check` raises before the first action.
        """
        self._trains = True
        self._run(self._program, lambda: self._begin(x, y, check), self._failure.end_step)
        outcome = Outcome(
            torch.stack(_in_order(self._results)).sum() if self._results else None,
            torch.cat(_in_order(self._input_gradients)) if self._input_gradients else None,
        )
        self._results, self._input_gradients = {}, {}
        return outcome

    @torch.no_grad()
    def forward_only(
        self, x: Tensor | None = None, y: Tensor | None = None, has_targets: bool = False
    ) -> list[Tensor]:
        """Return the output of each microbatch, or its loss with `has_targets`, on the last stage's rank.

        Nothing is kept for a backward, and the other ranks return an empty list. What goes wrong on one rank
        raises on all of them: an all-reduce of one number tells them, for no gradient comes back.
        """
        self._trains = False
        self._run(
            self._forwards, lambda: self._begin_forwards(x, y, has_targets), self._failure.end_step_on_all
        )
        results, self._results = self._results, {}
        return _in_order(results)

    def _run(
        self, program: list[Step], begin: Callable[[], None], end: Callable[[], Exception | None]
    ) -> None:
        self._failure.begin_step()
        self._waited = 0.0
        self._done: list[tuple[Action, tuple[timeline.Moment, timeline.Moment]]] = []
        self._results: dict[int, Tensor] = {}  # of the last stage, by microbatch: losses or outputs
        self._input_gradients: dict[int, Tensor] = {}
        self._xs: list[Tensor] = []
        self._ys: list[Tensor] = []
        for runner in self.runners.values():
            runner.begin_step()
        self._failure.compute_unless_failed(None, begin)
        for step in program:
            match step:
                case Receive(message, peer):
                    self._post(message, peer)
                case Send(message, peer):
                    self._send(message, peer)
                case WaitForSend(message):
                    self._wait(message, self._leaving.pop(message))
                case Action():
                    self._act(step)
        for action, when in self._done:  # not at once: a neighbour may be waiting for the result
            self._record(action, when)
        self._xs, self._ys = [], []
        if (error := end()) is not None:
            self._here.clear()
            for runner in self.runners.values():
                runner.begin_step()  # which forgets what was not ended
            raise error

    def _begin(self, x: Tensor | None, y: Tensor | None, check: Callable[[], None] | None) -> None:
        refuse_without_gradients()
        if check is not None:
            check()
        if 0 in self.runners:
            self._xs = microbatches_of_input(x, self.microbatches, self._boundaries[0])
        if self.last_stage in self.runners:
            self._ys = microbatches_of_targets(y, self.microbatches, self._rows)
        if self.watch is not None:
            self.watch.ignore([x, y])

    def _begin_forwards(self, x: Tensor | None, y: Tensor | None, has_targets: bool) -> None:
        if 0 in self.runners:
            self._xs = microbatches_of_input(x, self.microbatches, self._boundaries[0])
        if has_targets and self.last_stage in self.runners:
            self._ys = microbatches_of_targets(y, self.microbatches, self._rows)

    def _act(self, action: Action) -> None:
        needs, sends = received_by(action, self.last_stage), sent_by(action, self.last_stage)
        needed = None if needs is None else self._take(needs)
        runner, start = self.runners[action.stage], timeline.mark()
        runner.add_wait(self._waited)
        like = None if sends is None else self._boundary_of(sends)
        made = self._failure.compute_unless_failed(action, lambda: self._compute(action, needed), like)
        self._waited = 0.0
        self._done.append((action, runner.last_span() or (start, timeline.mark())))
        self._hand_over(action, made)
        if self.watch is not None and self._trains and not self._failure.has_failed:
            self._look(action)

    def _compute(self, action: Action, needed: Tensor | None) -> Tensor | None:
        (kind, microbatch, stage), runner = action, self.runners[action.stage]
        if kind == BACKWARD:
            return runner.backward(microbatch, needed)
        if kind == INPUT_GRADIENT:
            return runner.backward_input(microbatch, needed)
        if kind == WEIGHT_GRADIENT:
            return runner.backward_weight(microbatch)
        x = self._xs[microbatch] if needed is None else needed.requires_grad_()
        target = self._ys[microbatch] if stage == self.last_stage and self._ys else None
        if not self._trains:
            return runner.forward_only(x, target)
        with nullcontext() if self.watch is None else self.watch.saving(stage, microbatch):
            return runner.forward(microbatch, x, target)

    def _record(self, action: Action, when: tuple[timeline.Moment, timeline.Moment]) -> None:
        kind, microbatch, stage = action
        place = {"microbatch": microbatch, "stage": stage, "chunk": self._chunk_of[stage]}
        timeline.record(str(microbatch), GANTT_KIND[kind], *when, action=kind, **place)

    def _hand_over(self, action: Action, made: Tensor | None) -> None:
        message = sent_by(action, self.last_stage)
        if message is not None and made is not None:
            self._here[message] = made
        elif made is not None:
            (self._results if action.kind == FORWARD else self._input_gradients)[action.microbatch] = made

    def _look(self, action: Action) -> None:
        assert self.watch is not None
        if action.kind == INPUT_GRADIENT:
            deferred = self.runners[action.stage].deferred_tensors(action.microbatch)
            self.watch.deferred(action.stage, action.microbatch, deferred)
        self.watch.update_peak()

    def _post(self, message: Message, peer: int) -> None:
        like = self._boundary_of(message)
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        try:
            self._arriving[message] = buffer, irecv(buffer, peer, self._channels.of(peer, self._rank))
        except CommError as error:
            raise named_error(message, error) from error

    def _send(self, message: Message, peer: int) -> None:
        tensor = self._here.pop(message).contiguous()
        try:
            self._leaving[message] = isend(tensor, peer, self._channels.of(self._rank, peer))
        except CommError as error:
            raise named_error(message, error) from error

    def _take(self, message: Message) -> Tensor:
        """What another stage has made: of this rank, or of another one, then it may have to come yet."""
        if message in self._here:
            return self._here.pop(message)
        tensor, transfer = self._arriving.pop(message)
        self._wait(message, transfer, tensor)
        return tensor

    def _boundary_of(self, message: Message) -> Tensor:
        return self._boundaries[max(message.stage, message.receiver)]

    def _wait(
        self, message: Message, transfer: Transfer | SlowTransfer, arriving: Tensor | None = None
    ) -> None:
        start = timeline.now()
        try:
            with timeline.span("wait", "wait"):
                transfer.wait()
        except CommError as error:
            raise named_error(message, error) from error
        if arriving is not None:
            self._failure.check_message(arriving, message.kind)
        self._waited += (timeline.now() - start) / 1e9


def _in_order(by_microbatch: dict[int, Tensor]) -> list[Tensor]:
    return [tensor for _, tensor in sorted(by_microbatch.items())]


def named_error(message: Message, error: CommError) -> CommError:
    """Return an error that says which message went wrong, and between which stages."""
    what = "activation" if message.kind == FORWARD else "gradient"
    return CommError(
        f"The {what} of microbatch {message.microbatch} did not get from stage {message.stage} "
        f"to stage {message.receiver}. {error}"
    )
