"""Cut a model into stages, keep those of this rank, and train or evaluate them by a schedule.

    pipeline = Pipeline(GPT(config), one_f_one_b(4, 8), loss_of, example=x[:len(x) // 8])
    loss, _ = pipeline.step(x, y)             # forward and backward of 8 microbatches
    pipeline.finish_gradient_sync()           # an embedding that two stages share gets the sum
    optimizer.step()

    loss = pipeline.evaluate(x, y)            # on all ranks; forwards alone, in evaluation mode
    outputs = pipeline.forward_only(x)        # on the last stage's rank, None elsewhere

Every rank makes the full model with the same seed, and frees the stages of other ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import broadcast, chosen_pattern
from comm.cost import expected_traffic
from comm.point_to_point import irecv, isend, recv, send
from comm.wire.wire import Group
from lab.evaluation import evaluating
from lab.launch.errors import WorkbookError
from lab.trace.ledger import Traffic
from lab.trace.timeline import span
from pipeline_parallel.actions import Table, num_microbatches, placement
from pipeline_parallel.boundaries import agreed_stages, exchange_boundaries
from pipeline_parallel.by_hand import ByHand, HandWritten
from pipeline_parallel.clock import Clock, ClockRunner
from pipeline_parallel.executor import Executor, Outcome
from pipeline_parallel.failure import FLAG
from pipeline_parallel.messages import has_split_backward
from pipeline_parallel.stage import Stage, ties
from pipeline_parallel.stage_gradient import refuse_norms_of_a_stage
from pipeline_parallel.stage_runner import AutogradRunner, LossOf, StageRunner
from pipeline_parallel.tied import NewGradients
from training.clipping import clip_grad_norm_


class Pipeline(nn.Module):
    """Holds this rank's stages of `model`, which run on the ranks of `group` by the schedule `table`.

    `model` is an nn.Sequential, a list of modules, or one of the lessons' models. `example` is a microbatch
    of the input, for the rank of the first stage.

    The model is cut by `costs`: a number for each part (stage.py), "parameters", or "time", which measures
    the parts on the first stage's rank. By default an nn.Sequential is cut by its parameters, and a GPT by
    its layers. `split` says instead how many parts each stage takes.

    `recompute` makes stages keep only their input for the backward: all of them (True), or those given.
    `tick` replaces computing by a clock: it is the seconds that a microbatch's forward takes in all stages of
    a rank. `by_hand` is the class of a lesson, which runs in place of the executor and does what `table`
    says. WorkbookError if table and ranks, or parts and stages, do not fit together.

    Limits: all microbatches have the size of `example` (a DataLoader needs drop_last=True). x, y and what
    stages send are single tensors. The loss is the mean of the microbatches' means, and BatchNorm sees one
    microbatch at a time. A step under torch.no_grad() is refused. So are GradScaler and torch's
    clip_grad_norm_, which would see the gradients of one rank's stages alone; this class has its own
    clip_grad_norm_.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        table: Table,
        loss_of: LossOf,
        example: Tensor,
        group: Group = None,
        costs: Sequence[float] | str | None = None,
        split: Sequence[int] | None = None,
        recompute: bool | Sequence[int] = False,
        tick: float | None = None,
        by_hand: Callable[..., HandWritten] | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.group, self.table, self.rank_of = dist.get_rank(group), group, table, placement(table)
        model, stages = agreed_stages(model, table, example, costs, split, group)
        self.device = example.device
        self.layout = self._layout(model, stages)
        self.ties = [tie for tie in ties(stages) if self.rank_of[tie[0][0]] != self.rank_of[tie[1][0]]]
        own = [stage for stage, rank in self.rank_of.items() if rank == self.rank]
        self.stages = nn.ModuleDict({str(stage): stages[stage] for stage in own})
        self.boundaries, rows = exchange_boundaries(
            {stage: stages[stage] for stage in own}, self.rank_of, example, group
        )
        self._make_ties_equal()
        self._new = NewGradients()
        clock = Clock()
        recomputed = set(self.rank_of if recompute is True else recompute or ())

        def runner(stage: int) -> StageRunner:
            is_last = stage == len(stages) - 1
            microbatches = 1 if by_hand else num_microbatches(table)  # a lesson divides the loss itself
            if tick is not None:
                inputs, outputs = self.boundaries[stage], self.boundaries[stage + 1]
                return ClockRunner(clock, outputs, inputs, tick / len(own), self.device)
            is_split = has_split_backward(table)
            loss = loss_of if is_last else None
            dtype = self.boundaries[stage + 1].dtype
            return AutogradRunner(stages[stage], microbatches, loss, stage in recomputed, is_split, dtype)

        own_runners = {stage: runner(stage) for stage in own}
        arguments = table, own_runners, self.boundaries, self.rank, group, self.device
        run = Executor if by_hand is None else partial(ByHand, by_hand)
        self.executor = run(*arguments, rows=rows)
        self._evaluator = self.executor if by_hand is None else Executor(*arguments, rows=rows)

    def step(self, x: Tensor | None = None, y: Tensor | None = None) -> Outcome:
        """Do the forward and the backward of a batch; see Executor.step."""
        with self.noting_tied_gradients():
            outcome = self.executor.step(x, y, check=self._new.refuse_if_trained)
        if dist.get_world_size(self.group) > 1:
            tied = {parameter for parameter, _ in self._shared()}
            refuse_norms_of_a_stage(parameter for parameter in self.parameters() if parameter not in tied)
        return outcome

    def forward_only(self, x: Tensor | None = None) -> Tensor | None:
        """Return the model's outputs for a batch, on the rank of the last stage; None on the others.

        All ranks call it; the rank of the first stage needs `x`, with as many rows as in `step`. The
        microbatches follow each other through the stages (schedules.forward_only), in evaluation mode and
        without gradients. An error on one rank raises on all. Gradients, random numbers and the mode of
        every submodule are afterwards what they were.
        """
        with evaluating(self):
            outputs = self._evaluator.forward_only(x)
        return torch.cat(outputs) if outputs else None

    def evaluate(self, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        """Return the loss of a batch, on all ranks, in float64: the mean of the microbatches' means.

        All ranks call it, as `forward_only`; the rank of the last stage needs the targets `y`.
        """
        with evaluating(self):
            losses = self._evaluator.forward_only(x, y, has_targets=True)
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            if losses:
                loss.copy_(torch.stack(losses).mean())
            pattern = chosen_pattern("broadcast", self.group)
            broadcast(loss, self.rank_of[self.executor.last_stage], self.group, pattern=pattern)
        return loss

    def noting_tied_gradients(self) -> AbstractContextManager[None]:
        """Note, as `step` does, what the `with` block adds to tied gradients."""
        return self._new.collecting(parameter for parameter, _ in self._shared())

    def finish_gradient_sync(self) -> None:
        """Add what each copy of a shared parameter got since the last call to the other copy's gradient."""
        for mine, peer in [] if self._new.is_complete else self._shared():
            with span("tied gradient", "wait"):
                gradient = self._new.take(mine)
                gradient = torch.zeros_like(mine) if gradient is None else gradient
                others = torch.empty_like(gradient)
                # nccl has one queue for both directions: what one rank sends first, the other receives first.
                if self.rank < peer:
                    leaving = isend(gradient, peer, self.group)
                arriving = irecv(others, peer, self.group)
                if self.rank > peer:
                    leaving = isend(gradient, peer, self.group)
                arriving.wait()
                leaving.wait()  # before the sum overwrites what is sent
                mine.grad = (gradient if mine.grad is None else mine.grad).add_(others)
        self._new.is_complete = True

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Do what torch's clip_grad_norm_ does on the full model, where two copies of a parameter count once.

        All ranks call it, after `finish_gradient_sync`.
        """
        copies = self.later_copies()
        return clip_grad_norm_(self.parameters(), max_norm, self.group, copies=copies, device=self.device)

    def later_copies(self) -> set[nn.Parameter]:
        """Return this rank's copies of shared parameters whose other copy is in an earlier stage."""
        return {
            self.stages[str(stage)].get_parameter(name)
            for _, (stage, name) in self.ties
            if self.rank_of[stage] == self.rank
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise WorkbookError(
            "A pipeline computes forward and backward at once: call step(x, y). To evaluate, call "
            "evaluate(x, y) or forward_only(x)."
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the full model's parameters and buffers by name, on every rank. All ranks must call it."""
        own = {name: tensor for stage in self.stages.values() for name, tensor in stage.state_dict().items()}
        # One message for all tensors of a rank and dtype: each message costs a latency.
        by_owner: dict[tuple[int, torch.dtype], list[str]] = {}
        for name, (stage, like) in self.layout.items():
            by_owner.setdefault((self.rank_of[stage], like.dtype), []).append(name)
        full: dict[str, Tensor] = {}
        for (owner, dtype), names in by_owner.items():
            shapes = [self.layout[name][1].shape for name in names]
            sizes = [shape.numel() for shape in shapes]
            flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            if owner == self.rank:
                torch.cat([own[name].flatten() for name in names], out=flat)
            broadcast(flat, root=owner, group=self.group)
            for name, part, shape in zip(names, flat.split(sizes), shapes, strict=True):
                full[name] = part.view(shape)
        return {name: full[name] for name in self.layout}

    def load_full_state_dict(self, full: dict[str, Tensor]) -> None:
        """Load this rank's stages from `full_state_dict`, or from the state dict of the full model."""
        for stage in self.stages.values():
            names = stage.state_dict()
            stage.load_state_dict({name: full[name] for name in names})
        self._new.forget()

    def named_own_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the full model. A tied copy has its own name."""
        return {
            name: parameter for stage in self.stages.values() for name, parameter in stage.named_parameters()
        }

    def traffic_per_step(self) -> Traffic:
        """Return what this rank sends in a step.

        Over each boundary to another rank it sends m activations, or m gradients back. It also sends, once,
        the gradient of each parameter that it shares with another rank.
        """
        sent = messages = 0
        for boundary, like in self.boundaries.items():
            before, after = self.rank_of.get(boundary - 1), self.rank_of.get(boundary)
            if before is None or after is None or before == after or self.rank not in (before, after):
                continue
            messages += num_microbatches(self.table)
            sent += num_microbatches(self.table) * like.nbytes
        for parameter, _ in self._shared():
            messages += 1
            sent += parameter.nbytes
        return Traffic(sent, messages)

    def traffic_of_forward_only(self) -> Traffic:
        """Return what this rank sends in `forward_only`: m activations over each boundary to a stage of
        another rank, and its part of the all-reduce that says whether a rank has failed."""
        traffic = self._traffic_of("all_reduce", FLAG.itemsize)
        for boundary, like in self.boundaries.items():
            before, after = self.rank_of.get(boundary - 1), self.rank_of.get(boundary)
            if before == self.rank and after not in (None, self.rank):
                count = num_microbatches(self.table)
                traffic += Traffic(count * like.nbytes, count)
        return traffic

    def traffic_of_evaluate(self) -> Traffic:
        """Return what this rank sends in `evaluate`: as `forward_only`, and the broadcast of the loss."""
        root = self.rank_of[self.executor.last_stage]
        return self.traffic_of_forward_only() + self._traffic_of("broadcast", torch.float64.itemsize, root)

    def _traffic_of(self, op: str, itemsize: int, root: int = 0) -> Traffic:
        return expected_traffic(op, chosen_pattern(op, self.group), 1, itemsize, self.group, root)

    def _make_ties_equal(self) -> None:
        """Copy each shared parameter from the earlier stage to the later one."""
        for (earlier, name), (later, its_name) in self.ties:
            if self.rank_of[earlier] == self.rank:
                send(self.stages[str(earlier)].get_parameter(name), self.rank_of[later], self.group)
            elif self.rank_of[later] == self.rank:
                recv(self.stages[str(later)].get_parameter(its_name), self.rank_of[earlier], self.group)

    def _shared(self) -> list[tuple[nn.Parameter, int]]:
        """Return this rank's copies of parameters that a stage of another rank trains too, and that rank."""
        return [
            (parameter, self.rank_of[other])
            for tie in self.ties
            for (stage, name), (other, _) in (tie, tie[::-1])
            if self.rank_of[stage] == self.rank
            and (parameter := self.stages[str(stage)].get_parameter(name)).requires_grad
        ]

    @staticmethod
    def _layout(model: nn.Module, stages: list[Stage]) -> dict[str, tuple[int, Tensor]]:
        """Return, by name in the full model, the stage of each parameter and buffer, and its shape."""
        stage_of = {name: i for i, stage in reversed(list(enumerate(stages))) for name in stage.state_dict()}
        return {name: (stage_of[name], tensor.to("meta")) for name, tensor in model.state_dict().items()}
