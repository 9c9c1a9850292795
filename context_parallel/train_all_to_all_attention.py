"""All-to-all attention: a sequence is cut among ranks everywhere but in attention, where the heads are cut.

      tokens 0 1, all heads ─┐              ┌─ all tokens, head 0 ─ attention ─┐              ┌─ tokens 0 1
                             ├─ all-to-all ─┤                                  ├─ all-to-all ─┤
      tokens 2 3, all heads ─┘              └─ all tokens, head 1 ─ attention ─┘              └─ tokens 2 3

In attention a token needs all tokens before it, but each head works alone. So before attention each rank
sends every other rank the part of q, k and v that belongs to its heads, and gets all tokens of its own heads.
Then attention is that of one process, with fewer heads. Afterwards the outputs go back the same way.

      all-to-alls of a layer      2 forward, 2 backward
      bytes sent by a rank        2 (n-1)/n times those of q, k, v and y of its tokens

With more ranks a rank has fewer tokens, and sends less: about 2/n times q, k, v and y of all tokens. In the
ring that number hardly depends on n. But no attention is computed while the tensors travel, and there can be
no more ranks than heads of keys and values. All ranks compute equally much, whatever the mask.

The parts of the technique: sequence_cut.py and parallel_model.py cut the sequence and wrap a GPT, and
traffic.py has the formulas.

After Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", 2023, https://arxiv.org/abs/2309.14509.

Shapes by suffix: b batch, n ranks, h heads, t tokens, e width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.functions import exchange_shards
from comm.script import start
from context_parallel.parallel_model import ContextArgs, ContextParallel, SharedSequence
from context_parallel.sequence_cut import SequenceCut
from context_parallel.traffic import all_to_all_layer
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.trace.memory import Observed
from training.run import Run


def all_to_all_attention(
    q_bhte: Tensor, k_bhte: Tensor, v_bhte: Tensor, sequence: SharedSequence, dropout: float = 0.0
) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks, in the queries' shape.

    `sequence` says which tokens each rank has: contiguous chunks, in the order of the ranks. Each rank draws
    the dropout masks of its heads. Raise WorkbookError unless the ranks can have equally many heads.
    """
    ranks, heads = sequence.size, k_bhte.shape[1]
    if heads % ranks:
        raise WorkbookError(
            f"All-to-all attention divides heads, and {heads} heads of keys and values cannot be divided "
            f"among {ranks} ranks equally: choose a number of ranks that divides {heads}, or ring attention."
        )
    if any(len(chunks) > 1 for chunks in sequence.cut.chunks):
        raise WorkbookError(
            "All-to-all attention needs the tokens in the order of the ranks: cut the sequence with "
            "SequenceCut.contiguous. No other cut would balance it better."
        )
    # The heads of q, k and v that belong to one rank lie and travel together.
    to_ranks_bnhte = torch.cat([x.unflatten(1, (ranks, -1)) for x in (q_bhte, k_bhte, v_bhte)], 2)
    own_heads = all_tokens_of_own_heads(to_ranks_bnhte, sequence)
    q, k, v = own_heads.split([x.shape[1] // ranks for x in (q_bhte, k_bhte, v_bhte)], 1)
    mask, grouped = sequence.mask, q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, enable_gqa=grouped)
    return all_heads_of_own_tokens(y, sequence)


def all_tokens_of_own_heads(x_bnhte: Tensor, sequence: SharedSequence) -> Tensor:
    """Send each of n ranks its heads of this rank's tokens; return (b, h, all tokens, e)."""
    lengths = sequence.lengths
    own = lengths[sequence.rank]
    rows_tbhe = x_bnhte.permute(1, 3, 0, 2, 4).flatten(0, 1)  # what is for rank 0, for rank 1, ...
    arrived = exchange_shards(rows_tbhe, 0, sequence.group, [own] * sequence.size, lengths)
    return arrived.permute(1, 2, 0, 3)


def all_heads_of_own_tokens(y_bhte: Tensor, sequence: SharedSequence) -> Tensor:
    """Send each rank its tokens of this rank's heads; return (b, all heads, own tokens, e)."""
    lengths = sequence.lengths
    own = lengths[sequence.rank]
    arrived = exchange_shards(y_bhte, 2, sequence.group, lengths, [own] * sequence.size)
    return arrived.unflatten(2, (sequence.size, own)).transpose(1, 2).flatten(1, 2)


def main(cluster: Cluster, args: ContextArgs) -> None:
    # All ranks get all sequences, and each draws dropout masks of its own.
    run = Run(cluster, args, "context_all_to_all", share=(0, 1), stream=cluster.rank)
    model = ContextParallel(
        run.model(), all_to_all_attention, SequenceCut.contiguous, has_documents=args.documents
    )
    optimizer, observed = run.optimizer(model), Observed(model)
    for x, y in run.batches(model, optimizer):  # full sequences: each rank takes its tokens of them
        optimizer.zero_grad()
        loss = model.loss(model(x), y, run.num_targets)
        loss.backward()
        model.finish_gradient_sync()
        optimizer.step()
        run.record(loss)
    run.finish(model, model.traffic(x.shape, all_to_all_layer), **observed.fields())


if __name__ == "__main__":
    start(main, ContextArgs)
