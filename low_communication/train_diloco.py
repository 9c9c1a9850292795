"""DiLoCo: each rank trains H steps alone, and an outer optimizer takes a step with the ranks' mean change.

      anchor ──┬── rank 0: H steps of AdamW ──► change ──┐
               ├── rank 1: H steps of AdamW ──► change ──┼── mean ──► outer step ──► the new anchor, on all
               └── rank 2: H steps of AdamW ──► change ──┘

The *anchor* is where all ranks began: the parameters after the last synchronisation. What a rank has changed,
anchor - parameters, plays the part of a gradient. Its mean over the ranks goes into an outer optimizer, SGD
with Nesterov momentum, which has the same state on all ranks:

      momentum = mu momentum + change          anchor = anchor - outer_lr (change + mu momentum)

With an outer rate of 1 and no momentum the new anchor is the mean of the parameters: local SGD
(train_local_sgd.py). The inner optimizer's state stays on its rank and is never sent.

      bytes of a step     2 (n-1)/n P / H        as local SGD; P: bytes of all parameters, on a ring
      memory of a rank    2 P more: the anchor and its momentum

With `fragments=F` the parameters are divided into F fragments, first layers first. Each is synchronised every
H steps, but in other steps than the others, so F times less is sent at a time. With `delay=D` the training
goes on while a fragment travels, and its new anchor arrives D steps later; what the rank has learned
meanwhile is kept:

      step            0 ─────────── 8 ─────────── 16 ────────── 24 ────────── 32         H = 32, F = 4, D = 2
      fragment 1      train ────────┤ send ┤ the new anchor arrives in step 10
      fragment 2      train ──────────────────────┤ send ┤ ... in step 18

`wire` compresses what is sent (compressors.py): "bf16" or "int8". It is divided by nothing and rounded once.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
https://arxiv.org/abs/2311.08105; fragments and delay are from "Streaming DiLoCo with overlapping
communication", 2025, https://arxiv.org/abs/2501.18512, which mixes the new anchor with the rank's parameters.
"""

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from comm.collectives import Group, broadcast
from comm.script import start
from comm.wire.groups import own_group
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.trace.ledger import BACKGROUND, Traffic
from lab.trace.timeline import span
from low_communication.compressors import COMPRESSORS, Compressor
from low_communication.train_local_sgd import LocalArgs
from training.arguments import OPTIMIZERS
from training.guard import Guard
from training.run import Run
from training.valid_targets import count_valid


class Fragment:
    """Some of the parameters, flat: where they were at the last synchronisation, and the outer momentum."""

    def __init__(self, parameters: list[nn.Parameter], compressor: Compressor, due: int) -> None:
        self.parameters, self.compressor, self.due = parameters, compressor, due
        self.anchor = self.flat()
        self.momentum = torch.zeros_like(self.anchor)
        self.on_its_way: tuple[int, Tensor, Tensor, Future[Tensor]] | None = None

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
    parameters. If `delay` is not 0, `group` must be one in which nothing else is sent.
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
        self._guard = Guard(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not (0 <= delay < sync_every and 1 <= fragments <= min(sync_every, len(trained))):
            raise WorkbookError(
                f"sync_every {sync_every}, fragments {fragments}, delay {delay}: a delay is shorter than the "
                "steps between two synchronisations, and there are at most as many fragments as steps and "
                "as parameters."
            )
        self.fragments = []
        for i, parameters in enumerate(divide(trained, fragments)):
            compressor = COMPRESSORS[wire]([p.shape for p in parameters], group, pattern)
            self.fragments.append(Fragment(parameters, compressor, i * sync_every // fragments))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fragments")

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        self._guard.before_forward()
        return self.module(*inputs, **named_inputs)

    @torch.no_grad()
    def after_step(self) -> Traffic:
        """Count a step, receive the fragment whose delay is over, and send the one that is due.

        Returns what this rank is expected to have sent for it.
        """
        self.steps += 1
        sent = Traffic()
        for fragment in self.fragments:
            if self.steps % self.sync_every == fragment.due:
                self._send(fragment)
                sent += fragment.compressor.traffic()
            if fragment.on_its_way and fragment.on_its_way[0] + self.delay == self.steps:
                self._receive(fragment)
        return sent

    def _send(self, fragment: Fragment) -> None:
        """Start to average the ranks' changes since the anchor, and let the training go on."""
        left = fragment.flat()
        change = fragment.anchor - left
        averaged = self._thread.submit(fragment.compressor.mean, change)
        fragment.on_its_way = self.steps, left, change, averaged

    def _receive(self, fragment: Fragment) -> None:
        """Take the outer step, and move this rank's parameters by as much as the anchor is away."""
        assert fragment.on_its_way is not None
        sent_in, left, change, averaged = fragment.on_its_way
        fragment.on_its_way = None
        with span("wait", "wait"):
            averaged.result()
        fragment.momentum.mul_(self.outer_momentum).add_(change)
        fragment.anchor -= self.outer_lr * (change + self.outer_momentum * fragment.momentum)
        if sent_in == self.steps:
            fragment.set(fragment.anchor)
        else:  # keep what this rank has learned while the fragment travelled
            fragment.set(fragment.flat() + (fragment.anchor - left))

    @torch.no_grad()
    def finish(self) -> Traffic:
        """Synchronise all fragments at once, so that the ranks end with the same parameters."""
        sent = Traffic()
        for fragment in self.fragments:
            if fragment.on_its_way:
                self._receive(fragment)
            if self.delay or self.steps % self.sync_every != fragment.due:
                self._send(fragment)
                self._receive(fragment)
                sent += fragment.compressor.traffic()
        return sent


def divide(parameters: list[nn.Parameter], number: int) -> list[list[nn.Parameter]]:
    """Divide parameters, in their order, into fragments of about equal size."""
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
    """Number of steps after which a fragment that was sent must have arrived. 0: the rank waits for it."""
    wire_dtype: Literal["float32", "bf16", "int8"] = "float32"
    """Type of the numbers that are sent."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer, a number without unit."""
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
                record.loss = run.mean_loss(loss) if is_last else loss  # in between rank 0's own
            run.expect_traffic(sent, has_mean_loss=not is_last)
            run.evaluate(step, model)
            run.stop_if_asked(step)
    run.finish(model)


if __name__ == "__main__":
    start(main, DiLoCoArgs)
