"""Streaming DiLoCo: changes are sent in fragments and in few bits, while the training goes on.

Anchor, change and outer step are those of train_diloco_plain.py, the first look. There all parameters travel
in one step of H, and the ranks wait for them. Here three options make that cheaper; without them this is the
plain DiLoCo.

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

      bytes of a step     2 (n-1)/n P / H        as plain DiLoCo; int8: about a quarter of it
      memory of a rank    2 P more: the anchor and its momentum; with a delay, up to 2 P while P travels

The last round may be cut short: after the last step the ranks average what they have not averaged yet.

Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, https://arxiv.org/abs/2501.18512,
where a rank takes a weighted mean of its parameters and the new anchor.
"""

import dataclasses
import math
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from comm.background import BackgroundThread, BackgroundWork
from comm.collectives import Group, broadcast, use_pattern
from comm.script import start
from comm.wire.groups import own_group
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.trace.ledger import BACKGROUND, Traffic
from low_communication.compressors import COMPRESSORS, Compressor
from low_communication.train_local_sgd import LocalArgs
from training.guard import guarded
from training.run import Run

WIRES = ("float32", "bf16", "int8")  # the other compressors need error feedback


class AnchoredParameters:
    """Parameters, and flat tensors of their size: the anchor, and the outer momentum."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.anchor = self.flat()
        self.momentum = torch.zeros_like(self.anchor)

    def flat(self) -> Tensor:
        """Return a copy of the parameters as they are now."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    def set(self, flat: Tensor) -> None:
        """Give the parameters the values of a flat tensor."""
        for p, values in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.copy_(values.view_as(p))

    def outer_step(self, change: Tensor, outer_lr: float, outer_momentum: float) -> None:
        """Move the anchor by a step of SGD with Nesterov momentum; `change` is the mean over ranks."""
        self.momentum.mul_(outer_momentum).add_(change)
        self.anchor -= outer_lr * (change + outer_momentum * self.momentum)


class Fragment(AnchoredParameters):
    """Some of the parameters, which are sent in each step t with t mod H = `due`."""

    def __init__(self, parameters: list[nn.Parameter], compressor: Compressor, due: int) -> None:
        super().__init__(parameters)
        self.compressor, self.due = compressor, due
        self.traffic = compressor.traffic()
        # The step in which it was sent, the parameters then, and their change, being averaged.
        self.in_flight: tuple[int, Tensor, Tensor, BackgroundWork] | None = None
        self.last_equal_step = 0  # the last step after which all ranks had the same parameters


@guarded
class StreamingDiLoCo(nn.Module):
    """Wraps a module that every rank of `group` trains alone, and moves its fragments by outer steps.

    Call `after_step()` after each step of the rank's own optimizer. Each fragment is sent every `sync_every`
    steps, and arrives `delay` steps later. Call `finish()` after the last step: then all ranks have the same
    parameters. With a delay, `group` must be one in which nothing else is sent.

    Tied, frozen and unused parameters are supported, as in LocalSGD. Buffers become rank 0's at wrapping, and
    are not sent again.
    """

    takes_loads = False  # the anchor would stay as it was

    def __init__(
        self,
        module: nn.Module,
        sync_every: int = 32,
        group: Group = None,
        fragments: int = 1,
        delay: int = 0,
        wire: str = "float32",
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__()
        self.module, self.group = module, group
        self.sync_every, self.delay = sync_every, delay
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.steps = 0
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        refuse_options(len(trained), sync_every, fragments, delay, wire, outer_lr, outer_momentum, group)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self.fragments = list[Fragment]()
        self.sent = list[Fragment]()  # in the last step
        for i, parameters in enumerate(divided := divide_in_order(trained, fragments)):
            compressor = COMPRESSORS[wire]([p.shape for p in parameters], group)
            due = (i + 1) * sync_every // len(divided) % sync_every
            self.fragments.append(Fragment(parameters, compressor, due))
        self._thread = BackgroundThread("average")

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self.module(*inputs, **named_inputs)

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step, send the fragment that is due, and receive the one whose delay is over."""
        self.steps += 1
        self.sent.clear()
        for fragment in self.fragments:
            if self.steps % self.sync_every == fragment.due:
                self._send(fragment)
            if fragment.in_flight and fragment.in_flight[0] + self.delay == self.steps:
                self._receive(fragment)

    def _send(self, fragment: Fragment) -> None:
        """Start to average the ranks' changes since the anchor, and let the training go on."""
        sent_parameters = fragment.flat()
        change = fragment.anchor - sent_parameters
        fragment.in_flight = self.steps, sent_parameters, change, self._average(fragment, change)

    def _average(self, fragment: Fragment, change: Tensor) -> BackgroundWork:
        """Let the thread replace this rank's change by about the mean over ranks."""
        self.sent.append(fragment)
        return self._thread.run(partial(fragment.compressor.mean, change), change)

    def _receive(self, fragment: Fragment) -> None:
        """Take the outer step, and move this rank's parameters by the new anchor minus what was sent."""
        assert fragment.in_flight is not None
        sent_step, sent_parameters, change, averaged = fragment.in_flight
        fragment.in_flight = None
        averaged.wait()  # from here on `change` is the mean over ranks
        fragment.outer_step(change, self.outer_lr, self.outer_momentum)
        if sent_step == self.steps:
            fragment.set(fragment.anchor)
            fragment.last_equal_step = self.steps
        else:  # keep what this rank has learned while the fragment travelled
            fragment.set(fragment.flat() + (fragment.anchor - sent_parameters))

    @torch.no_grad()
    def finish(self) -> None:
        """Let the ranks end with the same parameters: average those that were trained since they were equal.

        This is no outer step: after a part of a round, the momentum of whole rounds would lead too far.
        """
        for fragment in self.fragments:
            if fragment.in_flight:
                self._receive(fragment)
            if fragment.last_equal_step < self.steps:
                change = fragment.anchor - fragment.flat()
                self._average(fragment, change).wait()
                fragment.anchor -= change
                fragment.set(fragment.anchor)
                fragment.last_equal_step = self.steps

    def traffic(self) -> Traffic:
        """Return what a rank sends in a step such as the last one."""
        return sum((fragment.traffic for fragment in self.sent), Traffic())


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


def divide_in_order(parameters: list[nn.Parameter], number: int) -> list[list[nn.Parameter]]:
    """Divide parameters into at most `number` fragments of about equal size.

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
class StreamingArgs(LocalArgs):
    """Streaming DiLoCo: changes are sent in fragments and in few bits, while the training goes on."""

    in_sight: ClassVar[set[str]] = {
        *("steps", "batch_size", "size", "sync_every", "fragments", "delay", "wire_dtype", "outer_lr"),
        *("link", "trace", "verbose", "json"),
    }

    averages_losses = False  # or the ranks would wait for each other while a fragment travels

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


def main(cluster: Cluster, args: StreamingArgs) -> None:
    run = Run(cluster, args, "diloco")
    group = own_group([list(range(cluster.world_size))], BACKGROUND)  # the loss travels in another one
    use_pattern(args.pattern, group)
    model = StreamingDiLoCo(
        run.model(), args.sync_every, group, args.fragments, args.delay, args.wire_dtype, args.outer_lr,
        args.outer_momentum,
    )  # fmt: skip
    optimizer = run.optimizer(model)
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model(x), y, run.own_targets)
        loss.backward()
        optimizer.step()
        model.after_step()
        if run.current_step == args.steps:
            model.finish()
        run.record(loss, traffic=model.traffic())
    run.finish(model, sync_every=args.sync_every, fragments=len(model.fragments))


if __name__ == "__main__":
    start(main, StreamingArgs)
