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
backward (parallelize.py). The parts of the technique, and the training loop, are those of
train_tensor_parallel.py. After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022, https://arxiv.org/abs/2205.05198.
"""

from comm.script import start
from lab.cluster import Cluster
from tensor_parallel import train_tensor_parallel
from tensor_parallel.train_tensor_parallel import Args


def main(cluster: Cluster, args: Args) -> None:
    train_tensor_parallel.main(cluster, args, "sequence_parallel", by_tokens=True)


if __name__ == "__main__":
    start(main, Args)
