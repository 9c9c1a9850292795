"""Ring attention: a sequence is cut among ranks, and keys and values travel round a ring of ranks.

      step 0             step 1             step 2                 q stays, k and v travel

      rank 0  q0 k0 v0   rank 0  q0 k2 v2   rank 0  q0 k1 v1       ┌─► rank 0 ─► rank 1 ─► rank 2 ─┐
      rank 1  q1 k1 v1   rank 1  q1 k0 v0   rank 1  q1 k2 v2       └───────────────────────────────┘
      rank 2  q2 k2 v2   rank 2  q2 k1 v1   rank 2  q2 k0 v0

A long sequence does not fit on one rank: the activations of all layers grow with its length. Here each of n
ranks has an n-th of the tokens, and only attention needs the others. Queries stay where they are. While a
rank attends to the keys that it has, it sends them on and receives the next ones, and after n steps its
queries have met all keys. The results are joined with the help of their log-sum-exp (block_attention.py).

The backward sends keys and values round again. The gradient of a rank's keys has a term from each rank's
queries. A rank keeps its own term. The terms of the other ranks are summed in a second message, which
follows the keys one step later: it starts at the right neighbour, each rank adds its term, and after n-1
messages it is home. The steps of a rank (with two ranks, step 1 is the last one):

      step 0          send k and v    compute own terms
      step 1          send k and v    compute terms                                      send them
      step 2 ...      send k and v    compute terms, wait for the left neighbour's, add  send the sum
      step n-1                        compute terms, wait for the left neighbour's, add  send the sum
      at the end                      wait for the left neighbour's, add own terms

      memory of a rank in a layer           its q, k, v, result and log-sum-exp; for a time two blocks of k
                                            and v, and in the backward two of their gradients, too
      messages of a rank in a layer         n-1 forward, 2 (n-1) backward
      their bytes                           3 (n-1) times the bytes of one rank's k and v
      time of a step of the forward         max(attention to one block, message of one block)

A rank waits for its left neighbour, which waits for its own, so the rank that computes longest delays all.
Under a causal mask that depends on who has which tokens: see sequence_cut.py, and compare --cut contiguous
with zigzag. All ranks have equal parameters but different tokens, so gradients of parameters are averaged
after the backward, in one all-reduce.

The parts of the technique: block_attention.py attends to some keys and joins results, sequence_cut.py says
who has which tokens, parallel_model.py wraps a GPT, traffic.py has the formulas, and clock.py takes the place
of computing for --metronome.

After Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023,
https://arxiv.org/abs/2310.01889.

Shapes by suffix: b batch, h heads, t tokens, e width of a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from tyro.conf import arg

from comm.point_to_point import InFlightShift
from comm.script import start
from context_parallel.block_attention import KERNELS, NO_KEY, join_results
from context_parallel.clock import clock
from context_parallel.parallel_model import ContextArgs, ContextParallel, SharedSequence
from context_parallel.sequence_cut import CUTS
from context_parallel.traffic import ring_layer
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig
from lab.trace.memory import Observed
from training.run import Run
from training.validate import tick_seconds


def ring_attention(
    q_bhte: Tensor, k_bhte: Tensor, v_bhte: Tensor, sequence: SharedSequence, dropout: float = 0.0
) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks, in the queries' shape.

    `sequence` says which tokens each rank has. Keys and values may have fewer heads than queries. Raise
    WorkbookError if there is dropout: the backward would need the masks of all blocks again.
    """
    if dropout:
        raise WorkbookError(
            f"Ring attention drops no attention probabilities, and the model asks for {dropout:g}: "
            "take all-to-all attention, or set `dropout` of the model's attention to 0."
        )
    return RingAttention.apply(q_bhte, k_bhte, v_bhte, sequence)


class RingAttention(torch.autograd.Function):
    """Attend to the keys of all ranks in turn, forward and backward. `sequence` is not differentiated."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequence: SharedSequence) -> Tensor:
        precise = torch.promote_types(q.dtype, torch.float32)  # to add up the results of several blocks
        y, lse = torch.zeros_like(q, dtype=precise), q.new_full(q.shape[:-1], NO_KEY, dtype=precise)
        for source, kv in visits(torch.stack([k, v]), sequence):  # kv: (2, b, h, t, e), keys and values
            for part in sequence.parts(source):
                rows, keys = part.queries, part.keys
                their_k, their_v = kv[:, :, :, keys]
                new_y, new_lse = sequence.kernel.attend(q[:, :, rows], their_k, their_v, part)
                y[:, :, rows], lse[:, :, rows] = join_results(y[:, :, rows], lse[:, :, rows], new_y, new_lse)
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.sequence = sequence
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, lse = ctx.saved_tensors
        sequence: SharedSequence = ctx.sequence
        dq, in_flight = torch.zeros_like(q, dtype=lse.dtype), None
        for source, kv in visits(torch.stack([k, v]), sequence):
            dkv = torch.zeros_like(kv)  # in the dtype in which it travels
            for part in sequence.parts(source):
                rows, keys = part.queries, part.keys
                dy_own, q_own, y_own, lse_own = (each[:, :, rows] for each in (dy, q, y, lse))
                their_k, their_v = kv[:, :, :, keys]
                dq_term, dk_term, dv_term = sequence.kernel.backward(
                    dy_own, q_own, their_k, their_v, y_own, lse_own, part
                )
                dq[:, :, rows] += dq_term
                dkv[0][:, :, keys] += dk_term
                dkv[1][:, :, keys] += dv_term
            if source == sequence.rank:  # in step 0
                own_dkv = dkv  # it waits here for the terms of the other ranks
            else:
                if in_flight is not None:
                    dkv += in_flight.wait()  # the terms of the ranks where these keys have been before
                # To the right neighbour, which has these keys next (in the last step they are its own). The
                # left one sends the terms of the keys that it has now, those of source - 1, modulo n. All
                # ranks start this message after that of the keys, so the two are not confused.
                in_flight = InFlightShift(dkv, sequence.block_like(kv, source - 1), sequence.group)
        if in_flight is not None:
            own_dkv += in_flight.wait()
        return dq.to(q.dtype), *own_dkv, None


def visits(kv: Tensor, sequence: SharedSequence) -> Iterator[tuple[int, Tensor]]:
    """Yield the keys and values of each rank, own first, while the next ones are on their way.

    `kv` (2, b, h, t, e) has those of this rank. Each item is the rank that they come from, and the tensor.
    """
    for step in range(sequence.size):
        source = (sequence.rank - step) % sequence.size
        if step == sequence.size - 1:
            yield source, kv
            return
        shift = InFlightShift(kv, sequence.block_like(kv, source - 1), sequence.group)
        yield source, kv
        kv = shift.wait()


@dataclass
class Args(ContextArgs):
    """Train a small GPT on long sequences, each of them cut among the ranks."""

    cut: Literal["zigzag", "contiguous"] = "zigzag"
    """Which tokens a rank gets. contiguous: an n-th in a row; under the causal mask the last rank then has
    most to compute. zigzag: an early and a late chunk, so that all ranks compute equally much."""
    kernel: Literal["fused", "textbook"] = "fused"
    """Who computes attention to a block of keys. fused: PyTorch's kernel on a CPU or an NVIDIA GPU. textbook:
    plain tensor operations, which store the scores of all pairs."""
    metronome: Annotated[str | None, arg(metavar="TIME")] = None
    """Replace attention by a clock: causal attention of a full sequence in one layer takes this time, such as
    40ms, and its backward twice that. A rank takes its part of it. Nothing is trained; messages stay real.
    Take a small --size, because the other layers compute."""


def main(cluster: Cluster, args: Args) -> None:
    # All ranks get all sequences, and each draws dropout masks of its own.
    run = Run(cluster, args, "context_ring", share=(0, 1), stream=cluster.rank)
    if args.link is None:
        run.not_measured = "messages round the ring are recorded as spans only with --link"
    plain, kernel = run.model(), KERNELS[args.kernel]
    if args.metronome is not None:
        plain = GPT(GPTConfig.named(args.size, block_size=args.length)).to(cluster.device)
        kernel = clock(tick_seconds(args.metronome), args.length)
    model = ContextParallel(plain, ring_attention, CUTS[args.cut], kernel, has_documents=args.documents)
    optimizer, observed = run.optimizer(model), Observed(model)
    for x, y in run.batches(model, optimizer):  # full sequences: each rank takes its tokens of them
        optimizer.zero_grad()
        loss = model.loss(model(x), y, run.num_targets)
        loss.backward()
        model.finish_gradient_sync()
        optimizer.step()
        run.record(loss)
    run.finish(model, model.traffic(x.shape, ring_layer), **observed.fields())


if __name__ == "__main__":
    start(main, Args)
