"""Sequence parallelism: divide by tokens what tensor parallelism replicates: norms, dropout and residuals.

      tokens of rank 0  ─► norm ─┐          ┌─► heads 0..1 ─┐                ┌─► tokens of rank 0 ─► norm ...
                                 ├─ gather ─┤               ├ reduce-scatter ┤
      tokens of rank 1  ─► norm ─┘          └─► heads 2..3 ─┘                └─► tokens of rank 1 ─► norm ...

An all-reduce is a reduce-scatter and an all-gather. With the norm between the two, each rank normalises an
n-th of the tokens, keeps an n-th of those activations, and sends the same number of bytes. With `--overlap`,
the default, a rank also keeps only an n-th of the gathered inputs, and gathers them again in the backward:
a quarter more bytes.

      activations of a layer     s b h (10 + 24/n + 5 a s / (h n))     tensor parallelism
      in bytes, in 16 bits       s b h (34 + 5 a s / h) / n            sequence parallelism
      s tokens, b examples, width h, a heads, n ranks

The weight of a norm sees only the tokens of its rank, so its gradient is summed over the ranks after the
backward (parallelize.py). The parts of the technique are those of train_tensor_parallel.py. After Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
https://arxiv.org/abs/2205.05198.
"""

from comm.collectives import use_pattern
from comm.script import start
from lab.cluster import Cluster
from lab.trace.memory import Observed
from lab.trace.timeline import span
from tensor_parallel.expected_traffic import figures, traffic_per_step
from tensor_parallel.parallelize import parallelize
from tensor_parallel.train_tensor_parallel import Args
from training.run import Run


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "sequence_parallel", share=(0, 1))  # all ranks train on the whole batch
    use_pattern(args.pattern)
    model = parallelize(run.model(), sequence_parallel=True, overlap=args.overlap)
    optimizer, observed = run.optimizer(model), Observed(model, model.module.blocks[0])
    with run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                with span("forward", "forward"), observed.forward():
                    loss = model.loss(model(x), y)
                with span("backward", "backward"):
                    loss.backward()
                model.finish_gradient_sync()
                if args.clip is not None:
                    model.clip_grad_norm_(args.clip)
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.mean_loss(loss)
            run.expect_traffic(traffic_per_step(model, *x.shape, is_clipped=args.clip is not None))
            run.evaluate(step, model)
            run.stop_if_asked(step)
    run.finish(model, **figures(model, observed, *x.shape))


if __name__ == "__main__":
    start(main, Args)
