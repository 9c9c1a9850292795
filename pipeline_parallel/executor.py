"""Run any schedule: one loop over a row of the table.

      for action in row:              a row of the table, such as F0 F1 B0 B1 (schedules.py)
          if it needs a message:      an activation from the stage before, a gradient from the stage after
              wait for it
          compute                     F, B, I or W of one microbatch in one stage (stage_runner.py)
          if another rank needs it:   an activation for the stage after, a gradient for the stage before
              start sending it

The executor knows nothing of GPipe or 1F1B, which are tables. A step of its loop is an action or a message,
which is named after what it carries: 0F1 is the output of stage 0 for microbatch 1, and 1I0 the gradient of
the input of stage 1 for microbatch 0. Rank 1 of 2 does this in 1F1B with two microbatches:

      Receive 0F0        post the receives of both activations, which are used by 1F0 and 1F1
      Receive 0F1
      1F0                wait for 0F0, and compute the forward of microbatch 0 in stage 1
      1B0                its backward, which makes the gradient 1I0 of the stage's input
      Send 1I0           start sending it to rank 0
      1F1  1B1  Send 1I1
      WaitForSend 1I0  WaitForSend 1I1      their memory may be used again

`with_messages` derives these steps from the table, and messages.py says why they cannot deadlock. The loop is
`Executor._run`, and `_act` does an action. The methods below `_take` complete a step: checks of the batch,
evaluation, timeline, activations. When one rank fails, all of them raise (failure.py).
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from comm.point_to_point import irecv, isend
from comm.transport.messages import AnyTransfer
from comm.wire.channels import Channels
from comm.wire.wire import Group
from lab.trace import timeline
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
from pipeline_parallel.message_waits import MessageWaits, naming
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
    """Holds what a step returns on this rank. The gradients are in the parameters.

    `loss` is the mean over the batch, on the rank of the last stage. `input_gradient` is the gradient of `x`,
    on the rank of the first stage, if `x` requires one.
    """

    loss: Tensor | None
    input_gradient: Tensor | None


class Executor:
    """Runs `table` on the ranks of `group`: row r on rank r.

    `runners` holds this rank's stages by their numbers. `boundaries[s]` is a tensor without memory that has
    the shape and dtype of the input of stage s, and of its gradient (Pipeline makes it). `rows` is the number
    of examples in a microbatch. `apart` is passed to comm's Channels.
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
        self._boundaries = boundaries
        programs = with_messages(table)
        self._rank, self._program = rank, programs[rank]
        self._forwards = with_messages(forward_only(table))[rank]
        self._channels = Channels(group, neighbours(programs), apart)
        self._failure = SharedFailure(group, device)
        self._ready: dict[Message, Tensor] = {}  # results to send, or for another stage of this rank
        self._arriving: dict[Message, tuple[Tensor, AnyTransfer]] = {}
        self._leaving: dict[Message, AnyTransfer] = {}

    def step(
        self, x: Tensor | None = None, y: Tensor | None = None, check: Callable[[], None] | None = None
    ) -> Outcome:
        """Do the forward and the backward of all microbatches, and add to the parameters' gradients.

        `x` is the full batch, for the rank of the first stage, and `y` its targets, for the rank of the last.
        An error on one rank raises on all of them: a batch that does not fit, an error in a stage, or one
        that `check` raises before the first action.
        """
        self._trains = True
        self._run(self._program, lambda: self._begin(x, y, check), self._failure.end_step)
        outcome = Outcome(
            torch.stack(_in_order(self._results)).sum() if self._results else None,
            torch.cat(_in_order(self._input_gradients)) if self._input_gradients else None,
        )
        self._results, self._input_gradients = {}, {}
        return outcome

    def _run(
        self, program: list[Step], begin: Callable[[], None], end: Callable[[], Exception | None]
    ) -> None:
        """Run all steps of a program in order."""
        self._start()
        self._failure.compute_unless_failed(None, begin)
        for step in program:
            match step:
                case Receive(message, peer):
                    self._post(message, peer)
                case Action():
                    self._act(step)
                case Send(message, peer):
                    self._send(message, peer)
                case WaitForSend(message):
                    self._waits.wait(message, self._leaving.pop(message))
        self._finish(end())

    def _act(self, action: Action) -> None:
        """Wait for what the action needs, compute, and keep the result for the message that comes next."""
        message = received_by(action, self.last_stage)
        received = None if message is None else self._take(message)
        self.runners[action.stage].add_wait(self._waits.seconds)
        start = timeline.mark()
        sent = sent_by(action, self.last_stage)
        like = None if sent is None else self._boundary_of(sent)
        result = self._failure.compute_unless_failed(action, lambda: self._compute(action, received), like)
        self._hand_over(action, result)
        self._after(action, start)

    def _compute(self, action: Action, received: Tensor | None) -> Tensor | None:
        (kind, microbatch, stage), runner = action, self.runners[action.stage]
        if kind == BACKWARD:
            return runner.backward(microbatch, received)
        if kind == INPUT_GRADIENT:
            return runner.backward_input(microbatch, received)
        if kind == WEIGHT_GRADIENT:
            return runner.backward_weight(microbatch)
        x = self._xs[microbatch] if received is None else received.requires_grad_()
        target = self._ys[microbatch] if stage == self.last_stage and self._ys else None
        if not self._trains:
            return runner.forward_only(x, target)
        with nullcontext() if self.watch is None else self.watch.saving(stage, microbatch):
            return runner.forward(microbatch, x, target)

    def _hand_over(self, action: Action, result: Tensor | None) -> None:
        message = sent_by(action, self.last_stage)
        if message is not None and result is not None:
            self._ready[message] = result
        elif result is not None:
            (self._results if action.kind == FORWARD else self._input_gradients)[action.microbatch] = result

    def _post(self, message: Message, peer: int) -> None:
        """Post the receive of a message."""
        like = self._boundary_of(message)
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        with naming(message):
            self._arriving[message] = buffer, irecv(buffer, peer, self._channels.of(peer, self._rank))

    def _send(self, message: Message, peer: int) -> None:
        """Start sending a result."""
        tensor = self._ready.pop(message).contiguous()
        with naming(message):
            self._leaving[message] = isend(tensor, peer, self._channels.of(self._rank, peer))

    def _take(self, message: Message) -> Tensor:
        """Return what another stage has made. If that is a stage of another rank, wait for its message."""
        if message in self._ready:
            return self._ready.pop(message)
        tensor, transfer = self._arriving.pop(message)
        self._waits.wait(message, transfer)
        self._waits.check(message, tensor, self._failure)
        return tensor

    def _boundary_of(self, message: Message) -> Tensor:
        return self._boundaries[max(message.stage, message.receiver)]

    @torch.no_grad()
    def forward_only(
        self, x: Tensor | None = None, y: Tensor | None = None, has_targets: bool = False
    ) -> list[Tensor]:
        """Return the output of each microbatch, or its loss with `has_targets`, on the last stage's rank.

        Nothing is kept for a backward, and the other ranks return an empty list. An error on one rank raises
        on all of them: an all-reduce of one number tells the others, because no gradient comes back.
        """
        self._trains, end = False, self._failure.end_step_on_all
        self._run(self._forwards, lambda: self._divide(x, y, has_targets), end)
        results, self._results = self._results, {}
        return _in_order(results)

    def _start(self) -> None:
        self._failure.begin_step()
        self._waits = MessageWaits()
        self._done: list[tuple[Action, tuple[timeline.Moment, timeline.Moment]]] = []
        self._results: dict[int, Tensor] = {}  # of the last stage, by microbatch: losses or outputs
        self._input_gradients: dict[int, Tensor] = {}
        self._xs: list[Tensor] = []
        self._ys: list[Tensor] = []
        for runner in self.runners.values():
            runner.begin_step()

    def _begin(self, x: Tensor | None, y: Tensor | None, check: Callable[[], None] | None) -> None:
        refuse_without_gradients()
        if check is not None:
            check()
        self._divide(x, y, has_targets=True)
        if self.watch is not None:
            self.watch.ignore([x, y])

    def _divide(self, x: Tensor | None, y: Tensor | None, has_targets: bool) -> None:
        if 0 in self.runners:
            self._xs = microbatches_of_input(x, self.microbatches, self._boundaries[0])
        if has_targets and self.last_stage in self.runners:
            self._ys = microbatches_of_targets(y, self.microbatches, self._rows)

    def _after(self, action: Action, start: timeline.Moment) -> None:
        self._waits = MessageWaits()
        runner = self.runners[action.stage]
        self._done.append((action, runner.last_span() or (start, timeline.mark())))
        if self.watch is None or not self._trains or self._failure.has_failed:
            return
        if action.kind == INPUT_GRADIENT:
            tensors = runner.deferred_tensors(action.microbatch)
            self.watch.deferred(action.stage, action.microbatch, tensors)
        self.watch.update_peak()

    def _finish(self, error: Exception | None) -> None:
        chunk_of = {stage: chunk for chunk, stage in enumerate(sorted(self.runners))}
        for (kind, microbatch, stage), when in self._done:  # only now, when no rank waits for a result
            place = {"microbatch": microbatch, "stage": stage, "chunk": chunk_of[stage]}
            timeline.record(str(microbatch), GANTT_KIND[kind], *when, action=kind, **place)
        self._xs, self._ys = [], []
        if error is not None:
            self._ready.clear()
            for runner in self.runners.values():
                runner.begin_step()  # it forgets what the failed step has left
            raise error


def _in_order(by_microbatch: dict[int, Tensor]) -> list[Tensor]:
    return [tensor for _, tensor in sorted(by_microbatch.items())]
