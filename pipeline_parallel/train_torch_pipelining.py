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
      any number of microbatches                   1F1B: at least as many as stages; interleaved and ZB-H1:
                                                   in rounds of equal size

Ours leaves out looped BFS and DualPipeV, cutting a model by tracing it, stages with several inputs or
outputs, and data parallel wrappers inside of stages.

pipeline.py cuts the model, ties weights and saves checkpoints here, and PyTorch runs the stages. All messages
of its schedules go through one function, and `by_comm` replaces it by comm's. So they travel as ours do, and
are counted, drawn and slowed down by --link as ours are. benchmarks/pipeline.py lets PyTorch send them
itself. As in ours, m activations and m gradients cross each boundary between ranks.

https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    schedules,
)

from comm.point_to_point import irecv, isend
from comm.script import start
from comm.transport.messages import AnyTransfer
from comm.wire.channels import Channels
from comm.wire.wire import Group
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.trace.timeline import span
from pipeline_parallel.actions import (
    BACKWARD,
    FORWARD,
    GANTT_KIND,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Table,
    num_microbatches,
)
from pipeline_parallel.activations import ActivationWatch
from pipeline_parallel.executor import Outcome
from pipeline_parallel.messages import neighbours, with_messages
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.run import ChunkedArgs, Run
from pipeline_parallel.schedules import table_of
from pipeline_parallel.stage_runner import LossOf
from training.arguments import NotOffered
from training.validate import validate_nccl

SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,  # of one stage a rank
    "zb_v": ScheduleZBVZeroBubble,
}


class WatchedStage(PipelineStage):
    """Runs PyTorch's stage, and reports its actions to the timeline and its activations to the watch."""

    chunk = 0
    watch: ActivationWatch | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        saving = nullcontext() if self.watch is None else self.watch.saving(self.stage_index, fwd_chunk_id)
        with self._doing(FORWARD, fwd_chunk_id), saving:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._doing(BACKWARD if full_backward else INPUT_GRADIENT, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._doing(WEIGHT_GRADIENT, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @contextmanager
    def _doing(self, kind: str, microbatch: int) -> Iterator[None]:
        what = {"action": kind, "microbatch": microbatch, "stage": self.stage_index, "chunk": self.chunk}
        with span(str(microbatch), GANTT_KIND[kind], **what):
            yield
        if self.watch is not None:
            self.watch.update_peak()


class TorchSchedule:
    """Runs the stages of `pipeline` by the PyTorch schedule that `schedule` names (see SINGLE and MULTI).

    `example` is a microbatch of the input. All ranks make it together: neighbouring ranks exchange a number.
    WorkbookError for what PyTorch refuses.
    """

    def __init__(self, pipeline: Pipeline, schedule: str, loss_of: LossOf, example: Tensor) -> None:
        self._pipeline, self._last = pipeline, len(pipeline.rank_of) - 1
        microbatches = num_microbatches(pipeline.table)
        self.stages = [self._stage(int(index), example.device) for index in pipeline.stages]
        for chunk, stage in enumerate(self.stages):
            stage.chunk = chunk

        def share_of_loss(y: Tensor, target: Tensor) -> Tensor:
            return loss_of(y, target) / microbatches

        try:
            # Without scale_grads: it would divide a gradient once for each stage that holds the weight.
            stages = self.stages if schedule in MULTI else self.stages[0]
            make = (SINGLE | MULTI)[schedule]
            self.schedule = make(stages, microbatches, loss_fn=share_of_loss, scale_grads=False)
        except (ValueError, AssertionError) as error:
            reason = str(error).rstrip(".")
            raise WorkbookError(
                f"PyTorch's {schedule} refuses: {reason}. Make --microbatches a multiple of the ranks."
            ) from error
        # The stages agree on shapes here, so that the first step sends no more than the other steps.
        start = self.schedule._initialize_stages if schedule in MULTI else self.schedule._initialize_stage
        start((example,), {})

    def _stage(self, index: int, device: torch.device) -> WatchedStage:
        # If the example of an input requires a gradient, each received activation does.
        boundaries = self._pipeline.boundaries
        like = [
            t.detach().requires_grad_(t.is_floating_point())
            for t in (boundaries[index], boundaries[index + 1])
        ]
        module = self._pipeline.stages[str(index)]
        module.register_forward_hook(lambda _, __, y: y.clone() if y._is_view() else y)
        return WatchedStage(module, index, self._last + 1, device, *like, group=self._pipeline.group)

    def step(self, x: Tensor, y: Tensor) -> Outcome:
        """Do the forward and the backward of the full batch, as Pipeline.step."""
        indices = {stage.stage_index for stage in self.stages}
        for stage in self.stages:
            stage.watch = self._pipeline.executor.watch
        losses: list[Tensor] = []
        inputs = (x,) if 0 in indices else ()
        target = y if self._last in indices else None
        with self._pipeline.noting_tied_gradients():
            self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return Outcome(torch.stack(losses).detach().sum() if losses else None, None)


class PendingMessage(NamedTuple):
    """Holds a message on its way, for which PyTorch calls `wait`."""

    transfer: AnyTransfer

    def wait(self) -> None:
        with span("wait", "wait"):
            self.transfer.wait()


@contextmanager
def by_comm(table: Table, group: Group = None) -> Iterator[None]:
    """Send the messages of PyTorch's schedules through comm, inside of the `with` block.

    `table` and `group` are those of the pipeline, and its ranks enter together.
    """
    channels, rank = Channels(group, neighbours(with_messages(table))), dist.get_rank(group)

    def start(ops: Sequence[dist.P2POp], desc: str | None = None) -> list[PendingMessage]:
        # Their order stays PyTorch's: the k-th receive from a rank meets its k-th send, in comm as in gloo.
        return [PendingMessage(one(op)) for op in ops]

    def one(op: dist.P2POp) -> AnyTransfer:
        peer = op.group_peer
        if op.op is dist.isend:
            return isend(op.tensor.contiguous(), peer, channels.of(rank, peer))
        return irecv(op.tensor, peer, channels.of(peer, rank))

    plain = schedules._batch_p2p
    schedules._batch_p2p = start
    try:
        yield
    finally:
        schedules._batch_p2p = plain


@dataclasses.dataclass
class Args(ChunkedArgs):
    """Train with PyTorch's torch.distributed.pipelining, on text (gpt) or handwritten digits (baby_cnn)."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"] = "1f1b"
    """Schedule, by PyTorch's own implementation. Only interleaved uses --chunks."""
    recompute: NotOffered = None  # not written for PyTorch's schedules here; pipeline_1f1b takes it
    metronome: NotOffered = None
    pattern: Literal["torch"] = "torch"
    """How the loss is averaged; PyTorch's schedules have no other collective."""


def main(cluster: Cluster, args: Args) -> None:
    validate_nccl(cluster, "torch.distributed.pipelining")
    run = Run(cluster, args, "pipeline_native")
    table = table_of(args.schedule, cluster.world_size, args.microbatches, args.chunks)
    pipeline = run.pipeline(table, args.schedule)
    optimizer = run.optimizer(pipeline)
    x, _ = run.batch(0)
    native = TorchSchedule(pipeline, args.schedule, loss_of, x[: len(x) // args.microbatches])
    with by_comm(table), run.checkpointing(pipeline, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                outcome = native.step(x, y)
                pipeline.finish_gradient_sync()
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.loss(outcome)
            run.expect_traffic(pipeline.traffic_per_step())
            run.evaluate(step, pipeline)
            run.stop_if_asked(step)
    run.finish(pipeline)


if __name__ == "__main__":
    start(main, Args)
