"""Tensor parallelism: every layer is divided among the ranks, and all ranks work on the same examples.

      rank 0   x ─► norm ─► heads 0..1 ─┐         ┌─► norm ─► half of the MLP ─┐         ┌─►
                                        ├── sum ──┤                            ├── sum ──┤
      rank 1   x ─► norm ─► heads 2..3 ─┘         └─► norm ─► half of the MLP ─┘         └─►

Data parallelism needs a model that fits on every rank, and ZeRO has to gather the parameters that it
computes with. Here a rank computes only with its shard: an n-th of the parameters, gradients, optimizer
state and multiplications. The price is paid in every layer, forward and backward, where the ranks wait for
each other:

      all-reduces of a block        2 forward, 2 backward, of batch * time * width numbers each
      bytes sent by a rank          4 * 2 (n-1)/n * batch * time * width * 4 for each block

So ranks that do this should be in one machine. In the backward the all-reduces hide behind the gradients of
the weights; with `--no-overlap` they do not.

The parts of the technique: layers.py has the idea, a column layer before a row layer; read it first.
cross_entropy.py computes the loss from divided logits. parallelize.py shows which layers of a GPT are divided
in which way, and traffic.py has the formulas.

After Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.
"""

import dataclasses

import training.arguments
from comm.script import start
from lab.cluster import Cluster
from lab.trace.memory import Observed
from tensor_parallel.parallelize import parallelize
from tensor_parallel.traffic import block_figures
from training.arguments import ClipArgs, NotOffered, Size
from training.run import Run


@dataclasses.dataclass
class Args(ClipArgs, training.arguments.Args):
    """Train a small GPT on the source of Python's standard library, its layers divided among the ranks."""

    size: Size = "24heads"
    """Size of the GPT (lab/models/model.py). The number of ranks must divide its number of heads: tiny and
    small have 4, 8layers and 13m have 8, 24heads has 24."""
    overlap: bool = True
    """Hide the reductions in the backward behind the gradients of the weights (layers.py)."""
    metronome: NotOffered = None  # it runs no layer, so there is nothing to divide


def main(cluster: Cluster, args: Args, mode: str = "tensor_parallel", by_tokens: bool = False) -> None:
    run = Run(cluster, args, mode, share=(0, 1))  # all ranks train on the whole batch
    model = parallelize(run.model(), sequence_parallel=by_tokens, overlap=args.overlap)
    optimizer, observed = run.optimizer(model), Observed(model, model.plain.blocks[0])
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        loss = model.loss(model(x), y)
        loss.backward()
        model.finish_gradient_sync()
        if args.clip is not None:
            model.clip_grad_norm_(args.clip)
        optimizer.step()
        run.record(loss)
    traffic = model.traffic(x.shape, is_clipped=args.clip is not None)
    run.finish(model, traffic, **block_figures(model, observed, x.shape))


if __name__ == "__main__":
    start(main, Args)
