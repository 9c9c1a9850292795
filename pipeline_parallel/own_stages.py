"""A rank holds one stage of the model or several, and shares a tied embedding with another rank.

      stage    0       1       2       3           GPT's embedding is in stage 0, and as the head in stage 3
      rank     0       1       0       1
               └── boundary 1, 2, 3 ──┘            an activation goes to the right, and its gradient back

Every rank makes the full model with the same seed, and keeps its own stages. At the start all stages run on
tensors without memory (device "meta"), so every rank knows the shapes that it will receive. Two ranks that
share a parameter hold a copy each. The copies start equal, and get the sum of both gradients.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.channels import Channels
from comm.collectives import broadcast
from comm.point_to_point import irecv, isend, recv
from lab.launch.errors import WorkbookError
from lab.trace.device_clock import DeviceClock
from lab.trace.ledger import Traffic
from lab.trace.makespan import actions_of
from lab.trace.observer import Describe
from pipeline_parallel.stage import LossOf, Stage
from training.evaluation import Sums, sums_of
from training.state_shards import StateShard, buffer_shards, trained_shards
from training.valid_targets import is_valid, refuse_other_means


class OwnStages(nn.Module):
    """Holds those of the model's `stages` that this rank runs.

    Stage s is on rank `rank_of[s]` of `group`, or by default on rank s. The model is the same on all ranks,
    and cut in the same way. `example` is a microbatch of the input, and `loss_of` the mean loss of the last
    stage's output. With `recompute` a stage keeps only its input for the backward. With `tick` a clock
    replaces computing: it is the seconds of a microbatch's forward in all stages of a rank.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        microbatches: int,
        loss_of: LossOf,
        example: Tensor,
        rank_of: dict[int, int] | None = None,
        group: dist.ProcessGroup | None = None,
        recompute: bool = False,
        tick: float | None = None,
    ) -> None:
        super().__init__()
        self.rank_of = {stage: stage for stage in range(len(stages))} if rank_of is None else rank_of
        if (ranks := dist.get_world_size(group)) != (wanted := len({*self.rank_of.values()})):
            raise WorkbookError(f"The schedule is for {wanted} ranks, and there are {ranks}.")
        self.rank, self.group = dist.get_rank(group), group
        self.device = example.device
        self.last, self.microbatches = len(stages) - 1, microbatches
        self.has_loss = self.rank_of[self.last] == self.rank
        own = {s: stage for s, stage in enumerate(stages) if self.rank_of[s] == self.rank}
        self.stages: Any = nn.ModuleDict({str(s): stage for s, stage in own.items()})
        # Boundary s is the input of stage s; the last boundary is the output of the last stage.
        self.boundaries = {0: example.to("meta")}
        for s, stage in enumerate(stages):
            stage.output = self.boundaries[s + 1] = stage.output_like(self.boundaries[s], s, recompute)
        stages[-1].loss_of = partial(loss_of)  # no submodule: its weights are not those of the model
        self._refuse_other_means: Any = None
        if tick is None and microbatches > 1:  # with the clock there is no loss
            self._refuse_other_means = partial(refuse_other_means, loss_of, self.boundaries[self.last + 1])
        clock = None if tick is None else DeviceClock(tick / len(own))
        for stage in own.values():
            stage.recompute, stage.clock = recompute, clock
        # By name in the full model: the stage of each parameter and buffer, and its shape.
        self.layout: dict[str, tuple[int, Tensor]] = {}
        first_names: dict[nn.Parameter, str] = {}  # a tied parameter has two names
        holders: dict[nn.Parameter, set[int]] = {}
        for s, stage in enumerate(stages):
            self.layout |= {name: (s, tensor.to("meta")) for name, tensor in stage.state_dict().items()}
            for name, parameter in stage.named_parameters():
                holders.setdefault(parameter, set()).add(self.rank_of[s])
                first_names.setdefault(parameter, name)
        self.first_names = {parameter: first_names[parameter] for parameter in self.parameters()}
        if idle := {*self.rank_of.values()}.difference(*holders.values()):
            raise WorkbookError(f"Rank {min(idle)} would have no parameters to train: cut fewer stages.")
        self._tie({parameter: sorted(ranks) for parameter, ranks in holders.items() if len(ranks) > 1})

    def _tie(self, shared: dict[nn.Parameter, list[int]]) -> None:
        """Open channels to other ranks, and make the copies equal that two ranks have of a parameter."""
        if any(len(ranks) > 2 for ranks in shared.values()):
            raise WorkbookError("Stages of three ranks share a parameter; a pipeline can tie those of two.")
        self.ties = [(low, high) for low, high in shared.values()]
        neighbours = {*pairwise(self.rank_of[s] for s in range(self.last + 1)), *self.ties}
        pairs = {pair for a, b in neighbours if a != b for pair in ((a, b), (b, a))}
        self.channels = Channels(self.group, pairs)
        # The groups in which messages go to higher and to lower ranks: with one for both nccl would deadlock.
        self.up, self.down = self.channels.of(0, 1), self.channels.of(1, 0)
        for parameter, (low, _) in shared.items():
            broadcast(parameter.data, root=low, group=self.group)
        # This rank's copies, and the rank of the other copy.
        self.tied = [(copy, sum(ranks) - self.rank) for copy, ranks in shared.items() if self.rank in ranks]
        self._is_complete = False  # the gradients of the copies are equal

    def finish_gradient_sync(self) -> None:
        """Give both copies of a shared parameter the sum of their gradients, and unused parameters zeros.

        Call it before the optimizer.
        """
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for copy, peer in [] if self._is_complete else self.tied:
            if not copy.requires_grad:
                continue
            gradient = torch.zeros_like(copy) if copy.grad is None else copy.grad
            theirs = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
            arriving = irecv(theirs, peer, self.channels.of(peer, self.rank))
            leaving = isend(gradient.contiguous(), peer, self.channels.of(self.rank, peer))
            arriving.wait()
            leaving.wait()  # before the sum overwrites what is sent
            copy.grad = gradient.add_(theirs)
        self._is_complete = True

    def begin_step(self, x: Tensor, y: Tensor, num_targets: float | None = None) -> None:
        """Validate a batch, and cut it into the microbatches `xs` and `ys`.

        A step after the tied gradients were added up is refused. `shares` has each microbatch's share of the
        loss: of the `num_targets` valid targets of the step, or by default of those in y (valid_targets.py).
        """
        self._refuse_shape(x)
        rows = self.microbatches * len(self.boundaries[0])
        if len(x) != rows or len(y) != rows:
            raise WorkbookError(
                f"The pipeline was made for x and y of {rows} rows, in {self.microbatches} microbatches, "
                f"and got {len(x)} and {len(y)} (a DataLoader's last batch may be smaller: drop_last=True)."
            )
        if self._is_complete and any(copy.grad is not None and copy.grad.any() for copy, _ in self.tied):
            raise WorkbookError("finish_gradient_sync() has added up tied gradients: call zero_grad() first.")
        self._is_complete = False
        self.xs: Sequence[Any] = x.chunk(self.microbatches)
        self.ys = y.chunk(self.microbatches)
        counts = is_valid(y).reshape(self.microbatches, -1).sum(1).tolist() if self.has_loss else []
        if num_targets is None and self._refuse_other_means is not None:
            self._refuse_other_means(self.ys if self.has_loss else (), self.group)
            self._refuse_other_means = None  # once is enough
        self.num_targets = num_targets or max(1, sum(counts))
        self.shares = [count / self.num_targets for count in counts]
        self.losses: list[Tensor] = []  # each microbatch's share of the loss

    def _refuse_shape(self, x: Tensor) -> None:
        """Raise WorkbookError unless examples have the shape for which the stages were made."""
        if x.shape[1:] != (like := self.boundaries[0]).shape[1:]:
            raise WorkbookError(
                f"The pipeline was made for microbatches of shape {tuple(like.shape)}, and got an x of shape "
                f"{tuple(x.shape)}: only the first dimension may differ, so pad sequences to one length."
            )

    def end_step(self) -> Tensor | None:
        """Return the loss of the batch on the rank of the last stage, None on the others."""
        return torch.stack(self.losses).sum() if self.losses else None

    def buffer_for(self, boundary: int, rows: int | None = None) -> Tensor:
        """Return memory for a boundary's activation or its gradient, which are sent contiguous.

        `rows` are those of the microbatch, if it has not as many as the example.
        """
        like = self.boundaries[boundary]
        shape = like.shape if rows in (None, len(self.boundaries[0])) else (rows, *like.shape[1:])
        return torch.empty(shape, dtype=like.dtype, device=self.device)

    def gradient_of(self, given: Tensor) -> Tensor:
        """Return the gradient of a stage's input, after the backward. It is zeros if none has come there."""
        return torch.zeros_like(given) if given.grad is None else given.grad

    def later_copies(self) -> set[nn.Parameter]:
        """Return this rank's copies of shared parameters whose other copy is on a lower rank."""
        return {copy for copy, peer in self.tied if peer < self.rank}

    @torch.no_grad()
    def forward_only(self, x: Tensor) -> Tensor | None:
        """Return the outputs for a batch on the rank of the last stage, None elsewhere. All ranks call it."""
        self._refuse_shape(x)
        arriving = list(x.chunk(self.microbatches))
        rows, expected = [len(part) for part in arriving], len(self.boundaries[0])
        sent = [self.boundaries[s] for s in range(1, self.last + 1)]
        if {*rows} != {expected} and any(len(like) != expected for like in sent):
            raise WorkbookError(
                f"A stage returns other rows than it takes, so evaluate microbatches of {expected} rows: x "
                f"has {len(x)}, and {self.microbatches} microbatches have {self.microbatches * expected}."
            )
        for name, stage in self.stages.items():
            index = int(name)
            made, leaving = [], []
            before, after = (self.rank_of.get(index + step, self.rank) for step in (-1, 1))
            for part, number in zip(arriving, rows, strict=True):
                if before != self.rank:
                    part = self.buffer_for(index, number)
                    recv(part, before, self.channels.of(before, self.rank))
                made.append(stage(part))
                if after != self.rank:
                    leaving.append(isend(made[-1].contiguous(), after, self.channels.of(self.rank, after)))
            for transfer in leaving:
                transfer.wait()
            arriving = made
        return torch.cat(arriving) if self.has_loss else None

    def evaluation_sums(self, x: Tensor, y: Tensor, counts: Tensor) -> Sums | None:
        """Return the sums over a held-out batch on the last stage's rank; None on the others."""
        outputs = self.forward_only(x)
        return None if outputs is None else sums_of(outputs, y, counts)

    def named_own_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the full model. A tied copy has its own name."""
        return {name: each for stage in self.stages.values() for name, each in stage.named_parameters()}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the full model's parameters and buffers by name, on every rank. All ranks must call it."""
        own = {name: tensor for stage in self.stages.values() for name, tensor in stage.state_dict().items()}
        full = {}
        for name, (stage, like) in self.layout.items():
            full[name] = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            if name in own:
                full[name].copy_(own[name])
            broadcast(full[name], root=self.rank_of[stage], group=self.group)
        return full

    def load_full_state_dict(self, full: dict[str, Tensor]) -> None:
        """Load this rank's stages from `full_state_dict`, or from the state dict of the full model."""
        for stage in self.stages.values():
            stage.load_state_dict({name: full[name] for name in stage.state_dict()})

    def state_shards(self, optimizer: torch.optim.Optimizer) -> list[StateShard]:
        """Return what this rank holds of the full model and of the optimizer's state, for a checkpoint."""
        copies = self.later_copies()
        found = [shard for stage in self.stages.values() for shard in buffer_shards(stage)]
        for parameter, name in self.first_names.items():
            found += trained_shards(name, parameter, optimizer, is_copy=parameter in copies)
        return found

    def observed(self) -> list[tuple[Stage, Describe]]:
        """Return each stage, and how the timeline describes its forwards and backwards (training/run.py)."""
        return [(stage, actions_of(int(name), self.microbatches)) for name, stage in self.stages.items()]

    def traffic(self) -> Traffic:
        """Return what this rank sends in a step: m tensors over each boundary, and tied gradients."""
        sent = [copy.nbytes for copy, _ in self.tied if copy.requires_grad]
        for boundary in range(1, self.last + 1):
            ranks = {self.rank_of[boundary - 1], self.rank_of[boundary]}
            if self.rank in ranks and len(ranks) == 2:
                sent += [self.boundaries[boundary].nbytes] * self.microbatches
        return Traffic(sum(sent), len(sent))
