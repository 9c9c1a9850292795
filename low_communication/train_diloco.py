"""DiLoCo: each rank trains H steps alone, and an outer optimizer takes a step with the ranks' mean change.

      anchor ──┬── rank 0: H steps of AdamW ──► change ──┐
               ├── rank 1: H steps of AdamW ──► change ──┼── mean ──► outer step ──► the new anchor, on all
               └── rank 2: H steps of AdamW ──► change ──┘

The *anchor* is where all ranks began: the parameters after the last synchronisation. What a rank has changed,
anchor - parameters, plays the part of a gradient. Its mean over the ranks goes into an outer optimizer, SGD
with Nesterov momentum, which has the same state on all ranks:

      momentum = mu momentum + change
      anchor   = anchor - outer_lr (change + mu momentum)          with the new momentum

With an outer rate of 1 and no momentum the new anchor is the mean of the parameters: local SGD
(train_local_sgd.py). The inner optimizer's state stays on its rank and is never sent.

      bytes of a step     2 (n-1)/n P / H        as local SGD; P: bytes of all parameters, n ranks in a ring
      memory of a rank    2 P more: the anchor and its momentum; with a delay, up to 2 P while P travels

With `fragments=F` the parameters are divided into F fragments, first layers first. Each is synchronised every
H steps, but no two in the same step, so F times fewer bytes travel at a time. With `delay=D` the training
goes on while a fragment travels, and its new anchor arrives D steps later:

      step            0 ─────────── 8 ─────────── 16 ────────── 24 ────────── 32         H = 32, F = 4, D = 2
      fragment 1      train ────────┤send┤ the new anchor arrives in step 10
      fragment 2      train ──────────────────────┤send┤ ... in step 18

Fragment 1 is sent in step 8 for the first time, so its first change is that of 8 steps. The rank keeps what
it learns in these D steps. When the new anchor arrives, it takes

      parameters = parameters + (new anchor - parameters that it sent)

`wire` is the type of the numbers that travel, "float32", "bf16" or "int8", with the bytes of compressors.py
for each. What the rounding of a change loses is lost. (In train_compressed.py it is sent with the next step.)

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
https://arxiv.org/abs/2311.08105; fragments and delay are from "Streaming DiLoCo with overlapping
communication", 2025, https://arxiv.org/abs/2501.18512, where a rank takes a weighted mean of its parameters
and the new anchor.
"""

import dataclasses
import math
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from comm.collectives import Group, broadcast
from comm.script import start
from comm.wire.groups import own_group
from comm.wire.staging import handover_of
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.trace.ledger import BACKGROUND, Traffic
from lab.trace.timeline import span
from low_communication.compressors import COMPRESSORS, Compressor
from low_communication.train_local_sgd import LocalArgs
from training.arguments import OPTIMIZERS
from training.old_guard import Guard
from training.old_run import Run
from training.valid_targets import count_valid

WIRES = ("float32", "bf16", "int8")  # the other compressors need error feedback


class Fragment:
    """Holds some of the parameters, and flat tensors of their size: the anchor, and the outer momentum.

    It is sent in each step t with t mod H = `due`.
    """

    def __init__(self, parameters: list[nn.Parameter], compressor: Compressor, due: int) -> None:
        self.parameters, self.compressor, self.due = parameters, compressor, due
        self.anchor = self.flat()
        self.momentum = torch.zeros_like(self.anchor)
        # The step in which it was sent, the parameters then, and their change, being averaged.
        self.in_flight: tuple[int, Tensor, Tensor, Future[None]] | None = None
        self.last_equal_step = 0  # the last step after which all ranks had the same parameters

    def flat(self) -> Tensor:
        """Return a copy of the parameters as they are now."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    def set(self, flat: Tensor) -> None:
        """Give the parameters the values of a flat tensor."""
        for p, values in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.copy_(values.view_as(p))


class DiLoCo(nn.Module):
    """Wraps a module that every rank of `group` trains alone, and moves it by outer steps.

    Call `after_step()` after each step of the rank's own optimizer. Each fragment is sent every `sync_every`
    steps, and arrives `delay` steps later. Call `finish()` after the last step: then all ranks have the same
    parameters. With a delay, `group` must be one in which nothing else is sent.

    Tied, frozen and unused parameters are supported, as in LocalSGD. Buffers become rank 0's at wrapping, and
    are not sent again. training/guard.py refuses a module that is changed after wrapping.
    """

    def __init__(
        self,
        module: nn.Module,
        sync_every: int = 32,
        group: Group = None,
        pattern: str | None = None,
        fragments: int = 1,
        delay: int = 0,
        wire: str = "float32",
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__()
        self.module, self.sync_every, self.delay = module, sync_every, delay
        self.outer_lr, self.outer_momentum, self.steps = outer_lr, outer_momentum, 0
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        refuse_options(len(trained), sync_every, fragments, delay, wire, outer_lr, outer_momentum, group)
        self._guard = Guard(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self.fragments = []
        for i, parameters in enumerate(parts := divide(trained, fragments)):
            compressor = COMPRESSORS[wire]([p.shape for p in parameters], group, pattern)
            due = (i + 1) * sync_every // len(parts) % sync_every
            self.fragments.append(Fragment(parameters, compressor, due))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fragments")

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        self._guard.before_forward()
        return self.module(*inputs, **named_inputs)

    @torch.no_grad()
    def after_step(self) -> Traffic:
        """Count a step, send the fragment that is due, and receive the one whose delay is over.

        Return what this rank is expected to send for it.
        """
        self.steps += 1
        sent = Traffic()
        for fragment in self.fragments:
            if self.steps % self.sync_every == fragment.due:
                self._send(fragment)
                sent += fragment.compressor.traffic()
            if fragment.in_flight and fragment.in_flight[0] + self.delay == self.steps:
                self._receive(fragment)
        return sent

    def _send(self, fragment: Fragment) -> None:
        """Start to average the ranks' changes since the anchor, and let the training go on."""
        sent_parameters = fragment.flat()
        change = fragment.anchor - sent_parameters
        fragment.in_flight = self.steps, sent_parameters, change, self._average(fragment, change)

    def _average(self, fragment: Fragment, change: Tensor) -> Future[None]:
        """Let the thread replace this rank's change by about the mean over ranks."""
        handover = handover_of([change]) or nullcontext()

        def average() -> None:
            with handover:
                fragment.compressor.mean(change)

        return self._thread.submit(average)

    def _receive(self, fragment: Fragment) -> None:
        """Take the outer step, and move this rank's parameters by as much as they were off the new anchor."""
        assert fragment.in_flight is not None
        sent_step, sent_parameters, change, averaged = fragment.in_flight
        fragment.in_flight = None
        with span("wait", "wait"):
            averaged.result()  # from here on `change` is the mean over ranks
        fragment.momentum.mul_(self.outer_momentum).add_(change)
        fragment.anchor -= self.outer_lr * (change + self.outer_momentum * fragment.momentum)
        if sent_step == self.steps:
            fragment.set(fragment.anchor)
            fragment.last_equal_step = self.steps
        else:  # keep what this rank has learned while the fragment travelled
            fragment.set(fragment.flat() + (fragment.anchor - sent_parameters))

    @torch.no_grad()
    def finish(self) -> Traffic:
        """Let the ranks end with the same parameters: average those that were trained since they were equal.

        This is no outer step: after a part of a round, the momentum of whole rounds would lead too far.
        Return what this rank is expected to send.
        """
        sent = Traffic()
        for fragment in self.fragments:
            if fragment.in_flight:
                self._receive(fragment)
            if fragment.last_equal_step < self.steps:
                change = fragment.anchor - fragment.flat()
                self._average(fragment, change).result()
                fragment.anchor -= change
                fragment.set(fragment.anchor)
                fragment.last_equal_step = self.steps
                sent += fragment.compressor.traffic()
        return sent


def refuse_options(
    parameters: int,
    sync_every: int,
    fragments: int,
    delay: int,
    wire: str,
    outer_lr: float,
    outer_momentum: float,
    group: Group,
) -> None:
    """Raise WorkbookError, in one sentence, unless DiLoCo can train so; `parameters` is their number."""
    for is_wrong, sentence in (
        (sync_every < 1, f"sync_every is {sync_every}: it is a number of steps, at least 1."),
        (
            not 1 <= fragments <= min(sync_every, parameters),
            f"fragments is {fragments}: it is a number from 1 to {min(sync_every, parameters)}, as there are "
            f"{sync_every} steps between two synchronisations, and {parameters} parameters.",
        ),
        (
            not 0 <= delay < sync_every,
            f"delay is {delay}: it is a number of steps from 0, and less than sync_every, {sync_every}.",
        ),
        (
            delay > 0 and group is None,
            "With a delay, messages travel beside those of the training: give DiLoCo a group of its own.",
        ),
        (wire not in WIRES, f"wire is {wire}: choose one of {', '.join(WIRES)}."),
        (not 0 < outer_lr < math.inf, f"outer_lr is {outer_lr}: it is a number above 0."),
        (
            not 0 <= outer_momentum < 1,
            f"outer_momentum is {outer_momentum}: it is a number from 0, and less than 1.",
        ),
    ):
        if is_wrong:
            raise WorkbookError(sentence)


def divide(parameters: list[nn.Parameter], number: int) -> list[list[nn.Parameter]]:
    """Divide parameters, in their order, into at most `number` fragments of about equal size.

    There can be fewer if a parameter is larger than a fragment.
    """
    total, before = sum(p.numel() for p in parameters), 0
    fragments: list[list[nn.Parameter]] = [[] for _ in range(number)]
    for parameter in parameters:
        middle = before + parameter.numel() / 2
        fragments[min(number - 1, int(middle * number / total))].append(parameter)
        before += parameter.numel()
    return [fragment for fragment in fragments if fragment]


@dataclasses.dataclass
class DiLoCoArgs(LocalArgs):
    """DiLoCo: each rank trains some steps alone, and an outer optimizer takes a step with the mean change."""

    in_sight: ClassVar[set[str]] = {
        *("steps", "batch_size", "size", "sync_every", "fragments", "delay", "wire_dtype", "outer_lr"),
        *("link", "trace", "verbose", "json"),
    }

    sync_every: int = 32
    """Number H of steps between two synchronisations of a fragment."""
    fragments: int = 1
    """Number of fragments that are synchronised in different steps."""
    delay: int = 0
    """Number of steps after which a fragment that was sent arrives. 0: the rank waits for it at once."""
    wire_dtype: Literal["float32", "bf16", "int8"] = "float32"
    """Type of the numbers that are sent."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer, a number: 1, without momentum, is local SGD."""
    outer_momentum: float = 0.9
    """Momentum of the outer optimizer: a number from 0 to less than 1."""


def main(cluster: Cluster, args: DiLoCoArgs) -> None:
    run = Run(cluster, args, "diloco")
    group = own_group([list(range(cluster.world_size))], BACKGROUND)  # the loss travels in another one
    model = DiLoCo(
        run.model(), args.sync_every, group, run.pattern, args.fragments, args.delay, args.wire_dtype,
        args.outer_lr, args.outer_momentum,
    )  # fmt: skip
    optimizer_class, options, _ = OPTIMIZERS[args.optimizer]
    optimizer = optimizer_class(model.parameters(), lr=args.lr, **options)
    with run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                with span("forward", "forward"):
                    loss = loss_of(model(x), y, count_valid(y))  # of this rank's own targets
                with span("backward", "backward"):
                    loss.backward()
                with span("step", "optimizer"):
                    optimizer.step()
                sent = model.after_step()
                is_last = step + 1 == args.steps
                if is_last:
                    sent += model.finish()
                record.loss = run.mean_loss(loss) if is_last else loss  # rank 0's own, until the last step
            run.expect_traffic(sent, with_loss=is_last)
            run.evaluate(step, model)
    run.finish(model, sync_every=args.sync_every, fragments=len(model.fragments))


if __name__ == "__main__":
    start(main, DiLoCoArgs)
