"""Run the same stages with PyTorch's own torch.distributed.pipelining, in the same loop.

      what ours does                               what PyTorch does
      a schedule is a table, and one executor      the same for interleaved and zero bubble; GPipe and 1F1B
      runs all of them                             have loops of their own
      a receive is posted two actions early, and   GPipe and 1F1B post a receive when they need it, and 1F1B
      a send is not waited for                     waits for its sends; the others do as ours
      the buffer of a message is made when its     buffers for m activations and m gradients are made at the
      receive is posted, and freed after its use   start, with any schedule, and kept
      an output is freed once it has been sent     it is kept until its backward
      zero bubble: linear layers and convolutions  each backward searches the graph for the nodes where the
      become nodes that leave dW for later         paths to the input and to the weights part; W begins there
      the first stage's I goes through its layers  its I is empty, and its W is the full backward
      an output may be a view                      not in zero bubble, so it is copied here
      the loss is divided by m                     the gradients are divided by m after the last backward
                                                   (scale_grads), twice for a parameter that two stages of a
                                                   rank share; so scale_grads is off here
      tied weights of two ranks get the sum        left to the user; here Pipeline does it
      each stage receives the shape of its input   the same, or the shapes are given, as here
      any number of microbatches                   1F1B, DualPipeV: at least as many as stages; interleaved
                                                   and ZB-H1: in rounds of equal size

Ours leaves out looped BFS, cutting a model by tracing it, stages with several inputs or outputs, and data
parallel wrappers inside of stages.

own_stages.py cuts the model, ties weights and saves checkpoints here, and PyTorch runs the stages and sends
their messages, which are therefore neither counted nor slowed down by --link. As in ours, m activations and m
gradients cross each boundary between ranks.

https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from comm.script import start
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.trace.ledger import Traffic
from lab.trace.timeline import span
from pipeline_parallel import script
from pipeline_parallel.actions import placement
from pipeline_parallel.balance import balanced_stages
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.schedules import table_of
from pipeline_parallel.script import begin, on_all_ranks
from training.arguments import NotOffered
from training.validate import validate_nccl

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,  # of one stage a rank
    "zb_v": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}


class TorchSchedule:
    """Runs the stages of `own` by the PyTorch schedule that `schedule` names.

    All ranks make it together: neighbouring ranks exchange a number. WorkbookError for what PyTorch refuses.
    """

    def __init__(self, own: OwnStages, schedule: str) -> None:
        self.own, is_multi = own, schedule not in ("gpipe", "1f1b")
        stages = [self._stage(int(index)) for index in own.stages]

        def share_of_loss(y: Tensor, target: Tensor) -> Tensor:
            return loss_of(y, target, own.num_targets)

        try:
            # Without scale_grads: it would divide a gradient once for each stage that holds the weight.
            self.schedule = SCHEDULES[schedule](
                stages if is_multi else stages[0], own.microbatches, loss_fn=share_of_loss, scale_grads=False
            )
        except (ValueError, AssertionError) as error:
            reason = str(error).rstrip(".")
            raise WorkbookError(
                f"PyTorch's {schedule} refuses: {reason}. Make --microbatches a multiple of the ranks."
            ) from error

    def _stage(self, index: int) -> PipelineStage:
        # If the example of an input requires a gradient, each received activation does.
        like = [
            torch.empty_like(boundary).requires_grad_(boundary.is_floating_point())
            for boundary in (self.own.boundaries[index], self.own.boundaries[index + 1])
        ]
        module = self.own.stages[str(index)]
        module.register_forward_hook(lambda _, __, y: y.clone() if y._is_view() else y)
        return PipelineStage(module, index, self.own.last + 1, self.own.device, *like, group=self.own.group)

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Do the forward and the backward of the full batch, as Pipeline.step."""
        self.own.begin_step(x, y)
        losses: list[Tensor] = []
        is_first, is_last = "0" in self.own.stages, str(self.own.last) in self.own.stages
        target = y if is_last else None
        self.schedule.step(*(x,) * is_first, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().sum() if is_last else None


@dataclasses.dataclass
class Args(script.Args):
    """Train with PyTorch's torch.distributed.pipelining, on text (gpt) or handwritten digits (baby_cnn)."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"] = "1f1b"
    """Schedule, by PyTorch's own implementation."""
    chunks: int = 2
    """Number of stages that each rank has in the interleaved schedule."""
    recompute: NotOffered = None  # not written for PyTorch's schedules here; pipeline_1f1b takes it
    metronome: NotOffered = None
    link: NotOffered = None  # PyTorch sends the messages itself
    pattern: Literal["torch"] = "torch"
    """How the loss is averaged; PyTorch's schedules have no other collective."""


def main(cluster: Cluster, args: Args) -> None:
    validate_nccl(cluster, "torch.distributed.pipelining")
    run, model, options = begin(cluster, args, "pipeline_native")
    table = table_of(args.schedule, cluster.world_size, args.microbatches, args.chunks)
    rank_of, m = placement(table), args.microbatches
    stages = balanced_stages(model, len(rank_of), args.balance)
    pipeline = OwnStages(stages, m, loss_of, rank_of=rank_of, **options)
    native = TorchSchedule(pipeline, args.schedule)
    optimizer = run.optimizer(pipeline)
    with run.checkpointing(pipeline, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                loss = native.step(x, y)
                pipeline.finish_gradient_sync()
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.mean_loss(on_all_ranks(loss, pipeline))
            tied = [copy.nbytes for copy, _ in pipeline.tied]  # torch's own messages are not counted
            run.expect_traffic(Traffic(sum(tied), len(tied)))
            run.evaluate(step, pipeline)
            run.stop_if_asked(step)
    run.finish(pipeline)


if __name__ == "__main__":
    start(main, Args)
