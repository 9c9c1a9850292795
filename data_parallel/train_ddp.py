"""Train with PyTorch's own DistributedDataParallel in the same loop, on text or on images.

      what ours does                               what DDP does
      buckets by hooks, last layers first          the same, in C++ (torch/csrc/distributed/c10d/reducer.cpp)
      1/4 MiB first, then bucket_mb=1              1 MiB first, then 25; a given bucket_cap_mb is for all
      order: the reverse of registration           the same in the first step, then as rank 0 observed it
      finish_gradient_sync() waits                 a callback at the end of the backward waits
      gradients live in the buckets                only with gradient_as_bucket_view=True; by default they are
                                                   copied out, and take their memory twice
      zero gradients for unused parameters         find_unused_parameters=True, else an error a step later;
                                                   a parameter that no rank used then has no gradient
      mean in the last hop of the ring             each rank divides its bucket before the all-reduce
      a ring on plain sockets                      gloo, or nccl on GPUs

Ours does not have: a broadcast of buffers in every forward (as the statistics of batch norm need), uneven
inputs (`join()`), static graphs, forwards under `torch.compile`, and a hook for other ways to communicate.

That hook sends DDP's buckets through `comm` here, with pattern "torch". So they are counted, drawn, and
slowed down by --link as ours are, while gloo or nccl still reduces them.
"""

import dataclasses
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from comm.collectives import CommError, Group, all_reduce
from comm.cost import expected_traffic
from comm.script import start
from data_parallel.train_naive_grad_accumulation import accumulate
from lab.cluster import Cluster
from lab.models.text import microbatches
from lab.trace import timeline
from lab.trace.gantt import MAIN_LANE
from lab.trace.ledger import Traffic
from training.arguments import AccumulationArgs
from training.run import Run


@dataclasses.dataclass
class Args(AccumulationArgs):
    """Train with PyTorch's DistributedDataParallel, on text (gpt) or handwritten digits (baby_cnn)."""

    model: Literal["gpt", "baby_cnn"] = "gpt"
    """Model to train: gpt on text, or baby_cnn on images of handwritten digits."""
    bucket_mb: float | None = None
    """Size in MiB at which a bucket takes no more parameters. None: DDP's own, 1 for the first bucket, then
    25."""
    pattern: Literal["torch"] = "torch"
    """Algorithm of the all-reduce: always PyTorch's own, which DDP uses."""


@dataclasses.dataclass
class HookState:
    """The input of the hook, and its error, if any: DDP cannot pass on an error from Python."""

    group: Group = None
    error: BaseException | None = None
    sizes: list[int] = dataclasses.field(default_factory=list)  # DDP does not show its buckets

    def check(self) -> None:
        """Raise the error that the hook has met in the backward, if any."""
        if self.error is not None:
            raise self.error

    def traffic(self) -> Traffic:
        """Return what a rank sends for the buckets of a step, which are float32."""
        return sum((expected_traffic("all_reduce", "torch", size, 4) for size in self.sizes), Traffic())


def through_comm(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks: a communication hook that calls comm with pattern "torch"."""
    gradients, bucket_is_last = bucket.buffer(), bucket.is_last()
    # nccl calls `finish` once its work is in the stream, long before it is done. A future that knows its
    # device records the stream, and DDP's stream waits for it; without a device DDP would read too early.
    devices: list[Any] = [gradients.device] if gradients.is_cuda else []
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

    def finish(error: BaseException | None) -> None:
        if bucket_is_last:
            # DDP waits inside the backward, where no span of ours could show it.
            timeline.record("wait", "wait", launched, timeline.mark(), lane=MAIN_LANE)
        state.error = state.error or error
        done.set_result(gradients)

    state.sizes.append(gradients.numel())
    try:
        handle = all_reduce(gradients, op="mean", group=state.group, async_op=True, pattern="torch")
        if gradients.is_cuda and dist.get_backend(state.group) == "gloo":
            handle.wait()  # which copies the result back to the GPU; the future knows nothing of that
    except CommError as error:
        launched = timeline.mark()
        finish(error)
    else:
        launched = timeline.mark()
        handle.when_done(finish)
    return done


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "data_parallel_ddp")
    model = DistributedDataParallel(run.model(), bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True)
    hook = HookState()
    model.register_comm_hook(hook, through_comm)
    optimizer = run.optimizer(model)
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        hook.sizes.clear()
        loss = accumulate(model, microbatches(x, y, args.grad_acc_steps), run.num_targets)
        hook.check()
        optimizer.step()
        run.record(loss, traffic=hook.traffic())
    run.finish(model, buckets=len(hook.sizes))


if __name__ == "__main__":
    start(main, Args)
