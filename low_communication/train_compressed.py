"""Compressed gradients: buckets as in lesson 2, of which less is sent, and an error that is sent later.

      gradient + what remained  ──►  compress  ──►  sent            ──►  mean over ranks  ──►  optimizer
               ▲                        │
               └────── what remains ◄───┘           for the next step, on this rank

A compressor (compressors.py) sends an approximation of the gradient. With *error feedback*, what it leaves
out is not lost: each rank keeps the difference, and adds it to its gradient in the next step. So the sum of
all that was sent up to a step is the sum of the gradients up to then, but for the last difference:

      sent + what remains = gradient + what remained before

The buckets, and when they are complete, are those of train_bucket_overlap.py. But a compressor may have two
collectives, one after another, with arithmetic in between, so a bucket cannot be left to one asynchronous
all-reduce. One thread of the rank works on the buckets in their order, which is the same on all ranks, while
the backward computes. In that time nothing else may use the same group. Each compressor's bytes are in
compressors.py. At best a step takes

      forward + max(backward, time on the wire of the compressed bytes + time to compress) + optimizer

With less on the wire, the time to compress counts, and each step learns less from its gradient. So compare
the time to a loss, and not the time of a step (benchmarks/sending_less.py). What remains takes as much memory
as the gradients; from the backward to `finish_gradient_sync()` twice as much, because a step that overflows
must leave no trace. Neither it nor PowerSGD's matrices are in a checkpoint: a resumed run begins without
them. A GradScaler that changes its scale changes the unit of what remains, once by a factor of two.

Error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, and, with a proof,
Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847. torch has
communication hooks for its DistributedDataParallel: `bf16_compress_hook`, `powerSGD_hook`.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from comm.background import BackgroundThread
from comm.collectives import Group
from comm.script import start
from data_parallel.train_bucket_overlap import Bucket, BucketArgs, BucketDataParallel
from data_parallel.train_naive_grad_accumulation import accumulate
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from low_communication.compressors import COMPRESSORS, Compressor, Float32
from training.guard import guarded
from training.run import Run


@guarded
class CompressedDataParallel(BucketDataParallel):
    """Wraps a module that every rank of `group` holds, and averages its compressed gradients over the ranks.

    It is used as BucketDataParallel. After `finish_gradient_sync()`, every `param.grad` approximates the mean
    over ranks, and is the same on all ranks. `compress` is a name of COMPRESSORS, and `options` are that
    compressor's. With `error_feedback=False` a rank forgets what it has not sent. Gradients are sent as they
    are as long as `is_compressing` is False.
    """

    in_flight: list[Any]  # the thread's work

    def __init__(
        self,
        module: nn.Module,
        compress: str = "int8",
        group: Group = None,
        bucket_mb: float = 1.0,
        error_feedback: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(module, group, bucket_mb)
        if error_feedback and any(p.dtype == torch.float16 for p in self.trained):
            raise WorkbookError("What remains may be too large for float16: take bfloat16 or float32.")
        self._compress, self._options = compress, options
        self.error_feedback, self.is_compressing = error_feedback, True
        self.restart()
        self._thread = BackgroundThread("compress")

    def restart(self) -> None:
        """Begin without anything that remains, as after loading a checkpoint."""
        self.compressors: dict[Bucket, Compressor] = {}
        self.uncompressed: dict[Bucket, Compressor] = {}
        for bucket in self.buckets:
            how = [shape_in_memory(view) for view in bucket.views.values()], self.group, bucket.flat.dtype
            self.compressors[bucket] = COMPRESSORS[self._compress](*how, **self._options)
            self.uncompressed[bucket] = Float32(*how)
        self.remaining: dict[Bucket, Tensor] = {}  # what this rank has not sent yet
        self._unsent: dict[Bucket, Tensor] = {}  # of this step
        self._snapshots: dict[Compressor, Any] = {}  # before this step
        self._are_finite: list[Tensor] = []  # the means of this step

    @property
    def in_use(self) -> dict[Bucket, Compressor]:
        return self.compressors if self.is_compressing else self.uncompressed

    def _launch(self, bucket: Bucket) -> None:
        """Let the thread average the bucket, after those before it, while the backward continues."""
        for parameter in bucket.missing:  # not used on this rank, but other ranks may have
            bucket.move_in(parameter)
        self.in_flight.append(self._thread.run(partial(self._average, bucket), bucket.flat))

    @torch.no_grad()
    def _average(self, bucket: Bucket) -> None:
        """Replace the bucket by an approximation of its mean, and keep what this rank has not sent."""
        if bucket in self.remaining:
            bucket.flat += self.remaining[bucket]
        gradient, compressor = bucket.flat.clone(), self.in_use[bucket]
        self._snapshots[compressor] = compressor.snapshot()
        sent = compressor.mean(bucket.flat)
        if self.error_feedback:
            self._unsent[bucket] = gradient.sub_(sent)
        self._are_finite.append(bucket.flat.isfinite().all())  # a GPU goes on: `bool` would wait for it

    def finish_gradient_sync(self) -> None:
        """Complete the means. A step with one that is inf or NaN is worth nothing, and leaves no trace."""
        super().finish_gradient_sync()
        if not self._are_finite or torch.stack(self._are_finite).all():
            self.remaining = self._unsent
        else:
            for compressor, snapshot in self._snapshots.items():
                compressor.restore(snapshot)
        self._unsent, self._snapshots, self._are_finite = {}, {}, []

    def traffic(self) -> Traffic:
        """Return what a rank sends in a step such as the last one."""
        return sum((compressor.traffic() for compressor in self.in_use.values()), Traffic())


def shape_in_memory(tensor: Tensor) -> list[int]:
    """Return the tensor's sizes, the dim of the largest stride first: how its numbers lie in the bucket."""
    return [size for _, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)]


@dataclasses.dataclass
class CompressedArgs(BucketArgs):
    """Compressed gradients: buckets of which less is sent, and an error that is sent later."""

    in_sight: ClassVar[set[str]] = {
        *("steps", "batch_size", "size", "compress", "compress_after", "error_feedback", "topk_share"),
        *("powersgd_rank", "link", "trace", "verbose", "json"),
    }

    compress: Literal["float32", "bf16", "int8", "topk", "powersgd"] = "int8"
    """Compressor: bf16 and int8 send fewer bits of each number, topk fewer numbers, powersgd two thin
    matrices in place of each matrix; float32 compresses nothing."""
    compress_after: int = 0
    """Number of first steps in which the gradients are sent as they are."""
    error_feedback: bool = True
    """Add what a step has not sent to the gradient of the next one."""
    topk_share: float = 0.01
    """Number above 0, and at most 1: the share of the numbers that topk sends."""
    powersgd_rank: int = 4
    """Number of columns of powersgd's matrices."""

    def options(self) -> dict[str, Any]:
        """Return the options of the compressor."""
        own: dict[str, dict[str, Any]] = {
            "topk": {"share": self.topk_share},
            "powersgd": {"rank": self.powersgd_rank},
        }
        return own.get(self.compress, {})


def main(cluster: Cluster, args: CompressedArgs) -> None:
    run = Run(cluster, args, "data_parallel_compressed")
    model = CompressedDataParallel(
        run.model(), args.compress, None, args.bucket_mb, args.error_feedback, **args.options()
    )
    optimizer = run.optimizer(model)
    for x, y in run.batches(model, optimizer):
        model.is_compressing = run.current_step > args.compress_after
        optimizer.zero_grad()
        loss = accumulate(model, microbatches(x, y, args.grad_acc_steps), run.num_targets)
        model.finish_gradient_sync()
        optimizer.step()
        run.record(loss, traffic=model.traffic())
    share = model.traffic().bytes_sent / max(1, BucketDataParallel.traffic(model).bytes_sent)
    meaning = f"The gradients took {share:.1%} of the bytes that they have uncompressed."
    run.finish(model, meaning=meaning, buckets=len(model.buckets), bytes_share=share)


if __name__ == "__main__":
    start(main, CompressedArgs)
