"""Run a step that is written by hand, and give it what the executor gives to a table.

A lesson's class (ModelParallel, AllForwardAllBackward) computes and sends in plain sight. It reaches the rest
of the workbook in four places, and each of them is completed here:

      stage(x)               recomputation, torch.autocast, the clock of --metronome
      messages.send(...)     names in the errors, failure marks (failure.py), events of waiting
      action("F3")           the event of a forward or backward, and the watch over its activations
      an exception           failure marks in place of the messages that other ranks still wait for

So the class also works alone, with plain layers and `comm.point_to_point`. An evaluation in a Pipeline runs
the executor on the forwards of the lesson's table; the class has its own `forward_only` for use without a
Pipeline.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from comm import point_to_point
from comm.errors import CommError
from comm.transport.messages import AnyTransfer
from comm.wire.channels import Channels
from comm.wire.wire import Group
from lab.trace import timeline
from pipeline_parallel.actions import (
    BACKWARD,
    FORWARD,
    GANTT_KIND,
    INPUT_GRADIENT,
    Action,
    Table,
    num_microbatches,
    parse_row,
    placement,
)
from pipeline_parallel.activations import ActivationWatch
from pipeline_parallel.batches import (
    microbatches_of_input,
    microbatches_of_targets,
    refuse_without_gradients,
)
from pipeline_parallel.executor import Outcome
from pipeline_parallel.failure import SharedFailure, failure_mark, validate_result
from pipeline_parallel.forward_with_graph import forward_of
from pipeline_parallel.message_waits import MessageWaits, naming
from pipeline_parallel.messages import Message, neighbours, received_by, sent_by, with_messages
from pipeline_parallel.stage_runner import StageRunner, without_autocast


class HandWritten(Protocol):
    """Describes the class of a lesson: one rank's stage, and how a batch goes through it."""

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Add the gradients of the batch to those of the parameters; return the loss on the last rank."""


class _Failed(Exception):
    """Ends the hand-written step early when this rank or another one has failed."""


class ByHand:
    """Runs a hand-written step in place of the executor, with the executor's arguments.

    `table` describes the step: rank r has stage r. It is not executed. It says which messages the other ranks
    still wait for when a step fails in the middle.
    """

    def __init__(
        self,
        lesson: Callable[..., HandWritten],
        table: Table,
        runners: Mapping[int, StageRunner],
        boundaries: Mapping[int, Tensor],
        rank: int,
        group: Group = None,
        device: torch.device | str = "cpu",
        rows: int | None = None,
    ) -> None:
        self.watch: ActivationWatch | None = None
        self.microbatches, self.last_stage = num_microbatches(table), max(placement(table))
        self._row, self._rank, self._rows = table[rank], rank, rows
        self._runner, self._boundaries, self._device = runners[rank], boundaries, device
        self._channels = Channels(group, neighbours(with_messages(table)))
        self._failure = SharedFailure(group, device)
        self._begin_step()
        stage, loss_of = forward_of(self._runner, is_last=rank == self.last_stage)

        def like(boundary: int) -> Tensor:
            return torch.empty(boundaries[boundary].shape, dtype=boundaries[boundary].dtype, device=device)

        self._lesson = lesson(
            stage=stage,
            loss_of=loss_of,
            microbatches=self.microbatches,
            rank=rank,
            ranks=len(table),
            input_like=None if rank == 0 else like(rank),
            output_like=None if rank == self.last_stage else like(rank + 1),
            messages=self,
            action=self._action,
        )

    def _begin_step(self) -> None:
        self._waits = MessageWaits()
        self._done: list[tuple[Action, tuple[timeline.Moment, timeline.Moment]]] = []
        self._numbers: Counter[tuple[str, int]] = Counter()  # messages so far, by kind and stage
        self._sent: set[Message] = set()
        self._received: set[Message] = set()
        self._leaving: dict[Message, AnyTransfer] = {}
        self._arriving: dict[Message, AnyTransfer] = {}

    def step(
        self, x: Tensor | None = None, y: Tensor | None = None, check: Callable[[], None] | None = None
    ) -> Outcome:
        """Do what Executor.step does, with the lesson's step."""
        self._failure.begin_step()
        self._begin_step()
        self._runner.begin_step()
        self._failure.compute_unless_failed(None, lambda: self._validate(x, y, check))
        leaf = loss = None
        try:
            if not self._failure.has_failed:
                if x is not None and self._rank == 0:
                    leaf = x.detach().requires_grad_(x.requires_grad)
                loss = self._lesson.step(leaf, y)  # type: ignore[arg-type]
        except _Failed:
            pass
        except CommError:
            raise
        except Exception as error:
            self._failure.record(error, self._done[-1][0] if self._done else None)
        if self._failure.has_failed:
            self._finish_messages()
        for action, when in self._done:  # only now, when no rank waits for a result
            place = {"microbatch": action.microbatch, "stage": action.stage, "chunk": 0}
            timeline.record(
                str(action.microbatch), GANTT_KIND[action.kind], *when, action=action.kind, **place
            )
        failure = self._failure.end_step()
        self._begin_step()
        if failure is not None:
            raise failure
        return Outcome(loss, None if leaf is None else leaf.grad)

    def _validate(self, x: Tensor | None, y: Tensor | None, check: Callable[[], None] | None) -> None:
        refuse_without_gradients()
        if check is not None:
            check()
        if self._rank == 0:
            microbatches_of_input(x, self.microbatches, self._boundaries[0])
        if self._rank == self.last_stage:
            microbatches_of_targets(y, self.microbatches, self._rows)
        if self.watch is not None:
            self.watch.ignore([x, y])

    @contextmanager
    def _action(self, text: str) -> Iterator[None]:
        """Time an action of the step, such as "F3", and measure the activations that are held after it."""
        [action] = parse_row(text, self._rank)
        self._runner.add_wait(self._waits.seconds)
        start = timeline.mark()
        try:
            with self._around(action):
                yield
        except Exception as error:
            self._failure.record(error, action)
            raise _Failed from error
        self._waits = MessageWaits()
        self._done.append((action, self._runner.last_span() or (start, timeline.mark())))
        if self.watch is not None:
            self.watch.update_peak()

    def _around(self, action: Action) -> AbstractContextManager[object]:
        if action.kind == BACKWARD:
            return without_autocast(torch.empty(0, device=self._device))
        return nullcontext() if self.watch is None else self.watch.saving(action.stage, action.microbatch)

    # The lesson calls these in place of the functions of comm.point_to_point.

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send and wait."""
        self.isend(tensor, dst).wait()

    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive and wait. After a failure of the sender, leave the step."""
        self.irecv(tensor, src).wait()

    def isend(self, tensor: Tensor, dst: int) -> "PendingSend":
        """Start sending the next activation to the rank after, or the next gradient to the rank before."""
        message = self._next(FORWARD if dst > self._rank else INPUT_GRADIENT, self._rank)
        action = Action(FORWARD if dst > self._rank else BACKWARD, message.microbatch, self._rank)
        try:
            validate_result(tensor, self._boundary_of(message), action)
        except Exception as error:
            self._failure.record(error, action)
            raise _Failed from error
        self._send(message, tensor)
        return PendingSend(self, message)

    def irecv(self, tensor: Tensor, src: int) -> "PendingReceive":
        """Post the receive of the next activation from the rank before, or gradient from the rank after."""
        message = self._next(FORWARD if src < self._rank else INPUT_GRADIENT, src)
        self._post(message, tensor)
        return PendingReceive(self, message, tensor)

    def _next(self, kind: str, stage: int) -> Message:
        number = self._numbers[kind, stage]
        self._numbers[kind, stage] += 1
        return Message(kind, number, stage)

    def _send(self, message: Message, tensor: Tensor) -> None:
        group = self._channels.of(self._rank, message.receiver)
        with naming(message):
            self._leaving[message] = point_to_point.isend(tensor.contiguous(), message.receiver, group)
        self._sent.add(message)

    def _post(self, message: Message, tensor: Tensor) -> None:
        group = self._channels.of(message.stage, self._rank)
        with naming(message):
            self._arriving[message] = point_to_point.irecv(tensor, message.stage, group)

    def sent(self, message: Message) -> None:
        """Wait until a message has left and its memory is free."""
        if message in self._leaving:
            self._waits.wait(message, self._leaving.pop(message))

    def received(self, message: Message, tensor: Tensor) -> None:
        """Wait until a message is in `tensor`. Leave the step if it says that its sender has failed."""
        self._waits.wait(message, self._arriving.pop(message))
        self._received.add(message)
        self._waits.check(message, tensor, self._failure)
        if self._failure.has_failed:
            raise _Failed

    def _finish_messages(self) -> None:
        """Receive what this step still expects, and send failure marks for what it still owes, in order."""
        for action in self._row:
            needed, made = received_by(action, self.last_stage), sent_by(action, self.last_stage)
            if needed is not None and needed not in self._received:
                if needed not in self._arriving:
                    like = self._boundary_of(needed)
                    self._post(needed, torch.empty(like.shape, dtype=like.dtype, device=self._device))
                self._waits.wait(needed, self._arriving.pop(needed))
            if made is not None and made not in self._sent:
                self._send(made, failure_mark(self._boundary_of(made), self._device))
        for message in list(self._leaving):
            self.sent(message)

    def _boundary_of(self, message: Message) -> Tensor:
        return self._boundaries[max(message.stage, message.receiver)]


class PendingSend(NamedTuple):
    """Holds a message that a rank has begun to send."""

    run: ByHand
    message: Message

    def wait(self) -> None:
        """Return when the tensor may be used again."""
        self.run.sent(self.message)


class PendingReceive(NamedTuple):
    """Holds a message whose receive a rank has posted."""

    run: ByHand
    message: Message
    tensor: Tensor

    def wait(self) -> None:
        """Return when the tensor has arrived."""
        self.run.received(self.message, self.tensor)
