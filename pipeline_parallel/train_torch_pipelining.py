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
      a stage may detach its input                 in zero bubble its weights then have no gradients
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
from collections.abc import Sequence
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
from pipeline_parallel import script
from pipeline_parallel.actions import placement
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.schedules import table_of
from pipeline_parallel.script import begin
from pipeline_parallel.stage import Stage, balanced_stages
from training.arguments import NotOffered
from training.validate import validate_nccl

TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,  # of one stage a rank
    "zb_v": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}


class TorchPipeline(OwnStages):
    """Holds this rank's stages, and runs them by the PyTorch schedule that `schedule` names.

    All ranks make it together: neighbouring ranks exchange a number. WorkbookError for what PyTorch refuses.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: str,
        microbatches: int,
        example: Tensor,
        rank_of: dict[int, int],
    ) -> None:
        super().__init__(stages, microbatches, loss_of, example, rank_of)
        parts, is_multi = [self._part(int(index)) for index in self.stages], schedule not in ("gpipe", "1f1b")

        def share_of_loss(y: Tensor, target: Tensor) -> Tensor:
            return loss_of(y, target, self.num_targets)

        try:
            # Without scale_grads: it would divide a gradient once for each stage that holds the weight.
            self.schedule = TORCH_SCHEDULES[schedule](
                parts if is_multi else parts[0], microbatches, loss_fn=share_of_loss, scale_grads=False
            )
        except (ValueError, AssertionError) as error:
            reason = str(error).rstrip(".")
            raise WorkbookError(
                f"PyTorch's {schedule} refuses: {reason}. Make --microbatches a multiple of the ranks."
            ) from error

    def _part(self, index: int) -> PipelineStage:
        # If the example of an input requires a gradient, each received activation does.
        given, made = (
            torch.empty_like(boundary).requires_grad_(boundary.is_floating_point())
            for boundary in (self.boundaries[index], self.boundaries[index + 1])
        )
        module = self.stages[str(index)]
        module.register_forward_hook(lambda _, __, y: y.clone() if y._is_view() else y)
        return PipelineStage(module, index, self.last + 1, self.device, given, made, group=self.group)

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Do the forward and the backward of the full batch, as Pipeline.step."""
        self.begin_step(x, y)
        target = y if self.has_loss else None
        inputs = (x,) if "0" in self.stages else ()
        self.schedule.step(*inputs, target=target, losses=self.losses, return_outputs=False)
        self.losses = [loss.detach() for loss in self.losses]
        return self.end_step()

    def observed(self) -> list[Any]:
        """Return no stage: some of PyTorch's schedules cut a backward into halves."""
        return []

    def traffic(self) -> Traffic:
        """Return what this rank sends in a step by itself: tied gradients. PyTorch sends all else."""
        tied = [copy.nbytes for copy, _ in self.tied if copy.requires_grad]
        return Traffic(sum(tied), len(tied))


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
    pipeline = TorchPipeline(stages, args.schedule, m, options["example"], rank_of)
    optimizer = run.optimizer(pipeline)
    for x, y in run.batches(pipeline, optimizer):
        optimizer.zero_grad()
        loss = pipeline.step(x, y)
        pipeline.finish_gradient_sync()  # of an embedding that two stages share
        optimizer.step()
        run.record(loss)  # None on ranks without the last stage
    run.finish(pipeline, traffic=pipeline.traffic())


if __name__ == "__main__":
    start(main, Args)
