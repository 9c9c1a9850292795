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
the weights (overlapped.py); `--no-overlap` runs the layers as layers.py shows them.

Read layers.py first: it has the idea. parallelize.py shows which layers of a GPT are divided in which way.
After Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.
"""

from comm.script import start
from lab.cluster import Cluster
from lab.trace.timeline import span
from tensor_parallel.parallelize import parallelize
from tensor_parallel.run import Args, Run


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "tensor_parallel")
    model = parallelize(run.model(), sequence_parallel=False, overlap=args.overlap)
    optimizer = run.optimizer(model)
    with run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                with span("forward", "forward"), run.observed(model, x):
                    loss = model.loss(model(x), y)
                with span("backward", "backward"):
                    loss.backward()
                model.finish_gradient_sync()
                if args.clip is not None:
                    model.clip_grad_norm_(args.clip)
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.mean_loss(loss)
            run.expect_traffic(model.traffic_per_step(*x.shape, is_clipped=args.clip is not None))
            run.evaluate(step, model)
            run.stop_if_asked(step)
    run.finish(model)


if __name__ == "__main__":
    start(main, Args)
