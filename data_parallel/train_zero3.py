"""ZeRO, stage 3, or fully sharded data parallel: a rank owns an n-th of everything and borrows the rest.

      forward     gather 0 | gather 1 | gather 2                    the next block's while this one computes
      compute              |  block 0 |  block 1 | block 2 |
      backward                                             | block 2 |  block 1  |  block 0  |
      gather                                        gather 1 | gather 0 |
      reduce-scatter                                                 |  block 2  |  block 1  | block 0

Stages 1 and 2 leave every rank with all parameters. But a block's are needed twice a step, for as long as
the block takes. In between they are freed. What comes first and last, the embeddings, the last norm, tied
weights, stays from the start of the forward to the end of the backward: it would be freed for nothing.

      memory    (P + G + O)/n and two blocks         traffic    3 (n-1)/n P: two gathers and a reduce-scatter

`reshard_after_forward=False` keeps the blocks between forward and backward: memory for one of the gathers.
The hooks that do it are in fully_sharded.py, and what becomes of a freed parameter is in freed.py.

After Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, and Zhao et al., "PyTorch FSDP: Experiences
on Scaling Fully Sharded Data Parallel", VLDB 2023, https://arxiv.org/abs/2304.11277.
"""

import contextlib
import dataclasses

import torch

from comm.script import start
from data_parallel.fully_sharded import FullyShardedDataParallel
from data_parallel.zero_run import ZeroArgs, ZeroRun, recompute_blocks
from lab.cluster import Cluster
from lab.model import loss_of
from lab.text import microbatches
from lab.timeline import span


@dataclasses.dataclass
class Args(ZeroArgs):
    """Train a small GPT on the source of Python's standard library, everything sharded."""

    bf16: bool = False
    """Compute and communicate in bfloat16; the shards, and the optimizer, stay float32."""
    recompute: bool = False
    """Keep only the inputs of blocks, and compute what is in them again in the backward."""
    reshard_after_forward: bool = True
    """Free blocks after their forward and gather them again for the backward."""


def main(cluster: Cluster, args: Args) -> None:
    run = ZeroRun(cluster, args, "zero3")
    module = run.model()
    if args.recompute:
        recompute_blocks(module)
    model = FullyShardedDataParallel(
        module,
        compute_dtype=torch.bfloat16 if args.bf16 else None,
        pattern=run.pattern,
        reshard_after_forward=args.reshard_after_forward,
    )
    optimizer = run.optimizer_class(model.parameters(), **run.options)
    memory = run.memory(3, model, optimizer, [unit.flat for unit in model.units])
    for step in run.steps(model, optimizer):
        parts = microbatches(*run.batch(step), args.grad_acc_steps)
        with run.step() as this:
            optimizer.zero_grad()
            total = torch.zeros((), device=cluster.device)
            for i, (x, y) in enumerate(parts):
                is_last = i == len(parts) - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    with span("forward", "forward"), memory.forward():
                        loss = loss_of(model(x), y) / len(parts)
                    with span("backward", "backward"):
                        loss.backward()
                total += loss.detach()
            model.finish_gradient_sync()
            if args.clip is not None:
                model.clip_grad_norm_(args.clip)
            with span("step", "optimizer"):
                optimizer.step()
            this.loss = run.mean_loss(total)
        run.sent(model.traffic_per_step(len(parts), args.clip is not None))
    held = memory.finish(as_json=args.json)
    with model.gathered() as whole:
        run.finish(whole, **held)


if __name__ == "__main__":
    start(main, Args)
