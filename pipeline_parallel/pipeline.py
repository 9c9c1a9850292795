"""Run any schedule: one loop over a row of the table.

      for action in row:              a row of the table, such as F0 F1 B0 B1 (schedules.py)
          if it needs a message:      an activation from the stage before, a gradient from the stage after
              wait for it
          compute                     F, B, I or W of one microbatch in one stage (stage.py)
          if another rank needs it:   an activation for the stage after, a gradient for the stage before
              start sending it

    pipeline = Pipeline(GPT(config), one_f_one_b(4, 8), loss_of, example=x[:len(x) // 8])
    loss = pipeline.step(x, y)                # forward and backward of 8 microbatches
    pipeline.finish_gradient_sync()           # an embedding that two stages share gets the sum
    optimizer.step()

    outputs = pipeline.forward_only(x)        # on the last stage's rank, None elsewhere

The loop knows nothing of GPipe or 1F1B, which are tables. A message is named after the action that makes it:
0F1 is the output of stage 0 for microbatch 1. 2I1 is the gradient of the input of stage 2, even if a B, not
an I, made it. messages.py says when receives are posted. Rank 1 of 2 does this in 1F1B with two microbatches:

      post the receives of 0F0 and 0F1
      1F0                wait for 0F0, and compute the forward of microbatch 0 in stage 1
      1B0                its backward, which makes 1I0, the gradient of the stage's input: start sending it
      1F1  1B1           the same for microbatch 1
      wait until all that was sent has arrived: its memory may be used again

What a microbatch needs for its backward is kept from its forward to its backward, and no longer. The output
is not kept: autograd starts the backward at the output's place in the graph (a gradient edge), so the memory
of the output is free once it has been sent. With I and W, the I leaves weight gradients to a list, `later`,
and the W computes them (deferred.py). In GPipe and 1F1B this list stays empty.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from comm.point_to_point import irecv, isend
from lab.trace.device_clock import Later
from lab.trace.timeline import span
from pipeline_parallel.actions import (
    FORWARD,
    GANTT_KIND,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Table,
    num_microbatches,
    placement,
)
from pipeline_parallel.deferred import Deferring, compute_gradients
from pipeline_parallel.messages import Message, proven_by, received_by, receives_before, sent_by
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.stage import Balance, LossOf, balanced_stages
from training.clipping import clip_grad_norm_

Place = tuple[int, int]  # microbatch and stage


class Pipeline(OwnStages):
    """Holds this rank's stages of `model`, which run on the ranks of `group` by the schedule `table`.

    `model` is an nn.Sequential, a list of modules, or one of the lessons' models, the same on all ranks.
    `example` is a microbatch of the input. `balance` says how the model is cut (stage.py), and the other
    options are those of OwnStages.

    Limits: all microbatches have the shape of `example` (a DataLoader needs drop_last=True). x, y and what
    stages send are single tensors, and a stage does not change its input. The loss is a mean over all valid
    targets, and BatchNorm sees one microbatch at a time. Gradients are complete after `finish_gradient_sync`,
    on the ranks that have the parameters: clip them with this class's own `clip_grad_norm_`.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        table: Table,
        loss_of: LossOf,
        example: Tensor,
        group: dist.ProcessGroup | None = None,
        balance: Balance = "layers",
        recompute: bool = False,
        tick: float | None = None,
    ) -> None:
        rank_of, microbatches = placement(table), num_microbatches(table)
        stages = balanced_stages(model, len(rank_of), balance)
        super().__init__(stages, microbatches, loss_of, example, rank_of, group, recompute, tick)
        self.table = table
        self.row, self.receives = table[self.rank], receives_before(table, self.rank)
        self.proven = proven_by(table, self.rank)
        self.split = {action[1:] for action in self.row if action.kind == INPUT_GRADIENT}
        self.chunk_of = {int(stage): chunk for chunk, stage in enumerate(self.stages)}
        self.kept: dict[Place, tuple[Tensor, GradientEdge | None]] = {}  # from a forward to its backward
        self.later: dict[Place, Later] = {}  # weight gradients to compute
        self.ready: dict[Message, Tensor] = {}  # results for another stage of this rank
        self.arriving: dict[Message, tuple[Tensor, Any]] = {}
        self.leaving: dict[Message, Any] = {}

    def step(self, x: Tensor, y: Tensor, num_targets: float | None = None) -> Tensor | None:
        """Do the forward and the backward of all microbatches, and add to the parameters' gradients.

        Return the mean loss on the rank of the last stage, None on the others. `x` is the full batch, which
        the rank of the first stage uses, and `y` its targets, for the rank of the last one. Pipelines that
        share a step give the same `num_targets` (training/valid_targets.py).
        """
        self.begin_step(x, y, num_targets)
        for action, receives in zip(self.row, self.receives, strict=True):
            for message in receives:
                self.post(message)
            given = self.take(received_by(action, self.last))
            with self.shown(action):
                made = self.compute(action, given)
            if made is not None:
                self.hand_over(sent_by(action, self.last), made)
        for transfer in self.leaving.values():
            transfer.wait()
        self.leaving.clear()
        return self.end_step()

    def observed(self) -> list[Any]:
        """Return no stage: `step` records its actions itself, of which some are halves of a backward."""
        return []

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Do what torch's clip_grad_norm_ does on the full model, where two copies of a parameter count once.

        All ranks call it, after `finish_gradient_sync`. (torch's own sees only the gradients of this rank.)
        """
        uncounted = self.later_copies()
        return clip_grad_norm_(self.parameters(), max_norm, [self.group], norm_type, uncounted, self.device)

    def compute(self, action: Action, given: Tensor | None) -> Tensor | None:
        """Do an action; return its result: an output, a share of the loss, or the gradient of an input."""
        kind, microbatch, stage = action
        if kind == FORWARD:
            x = self.xs[microbatch] if given is None else given.requires_grad_()
            return self.run_forward(microbatch, stage, x, self.ys[microbatch] if stage == self.last else None)
        with torch.autocast(self.device.type, enabled=False):  # it computes in the dtypes of its forward
            if kind == WEIGHT_GRADIENT:
                compute_gradients(self.later.pop((microbatch, stage)))
                return None
            return self.run_backward(microbatch, stage, given)

    def run_forward(self, microbatch: int, stage: int, x: Tensor, target: Tensor | None) -> Tensor:
        """Return the stage's output, or its share of the mean loss, and keep what the backward needs."""
        place = microbatch, stage
        later = self.later.setdefault(place, []) if place in self.split else None
        with self.splitting(place):
            y = self.stages[str(stage)](x, target, later)
        if target is not None:
            y = y * self.shares[microbatch]
        self.kept[place] = x, get_gradient_edge(y) if y.grad_fn is not None else None
        return y.detach()

    def run_backward(self, microbatch: int, stage: int, dy: Tensor | None) -> Tensor | None:
        """Return the gradient of the stage's input, given that of its output; None is for the loss.

        If the backward is split, the weight gradients of linear layers are left to `later`.
        """
        x, edge = self.kept.pop((microbatch, stage))
        if edge is not None:  # no gradient flows through a stage that is frozen or detaches its input
            with self.splitting((microbatch, stage)):
                torch.autograd.backward([edge], [dy])
        return self.gradient_of(x) if stage > 0 else None

    def splitting(self, place: Place) -> AbstractContextManager[Any]:
        """Split the layers that a forward computes, or a backward again, if the table has I and W there."""
        return Deferring(self.later[place]) if place in self.later else nullcontext()

    def shown(self, action: Action) -> AbstractContextManager[None]:
        """Show the action in the timeline."""
        kind, microbatch, stage = action
        place = {"microbatch": microbatch, "stage": stage, "chunk": self.chunk_of[stage]}
        return span(str(microbatch), GANTT_KIND[kind], action=kind, **place)

    def post(self, message: Message) -> None:
        """Post the receive of a message."""
        # A boundary has the number of the stage after it.
        buffer = self.buffer_for(max(message.stage, message.receiver))
        peer = self.rank_of[message.stage]
        self.arriving[message] = buffer, irecv(buffer, peer, self.channels.of(peer, self.rank))

    def take(self, message: Message | None) -> Tensor | None:
        """Return what another stage has made. If that is a stage of another rank, wait for its message."""
        if message is None or message in self.ready:
            return None if message is None else self.ready.pop(message)
        buffer, transfer = self.arriving.pop(message)
        with span("wait", "wait"):
            transfer.wait()
        for arrived in self.proven[message]:  # so their memory may be freed
            self.leaving.pop(arrived).wait()
        return buffer

    def hand_over(self, message: Message | None, made: Tensor) -> None:
        """Start sending a result to the stage that needs it, or keep it for a stage of this rank."""
        if message is None:  # only the last stage's forward makes something that no stage needs: the loss
            self.losses.append(made)
        elif (to := self.rank_of[message.receiver]) == self.rank:
            self.ready[message] = made
        else:
            self.leaving[message] = isend(made.contiguous(), to, self.channels.of(self.rank, to))
