"""Pairwise pattern: each rank has a different part for every other rank, and sends it there directly.

      rank 0: [a0 a1 a2]        rank 0: [a0 b0 c0]         The result is a transpose. No two ranks need
      rank 1: [b0 b1 b2]   ──►  rank 1: [a1 b1 c1]         the same part and no parts are added up, so
      rank 2: [c0 c1 c2]        rank 2: [a2 b2 c2]         each part crosses one link, once.

A rank sends n-1 messages, (n-1)/n of its B bytes: (n-1) alpha + (n-1)/n B beta (cost.py).
"""

import torch

from comm.wire.wire import Wire


def all_to_all(
    wire: Wire, output: torch.Tensor, full: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
) -> None:
    """Send part p of `full` to rank p, and receive part p of `output` from it. Sizes count elements."""
    n, r = wire.size, wire.rank
    outgoing, incoming = full.split(in_sizes), output.split(out_sizes)
    # Each rank starts with a different partner. Otherwise all ranks would send to rank 0 first.
    sources = [(r - step) % n for step in range(1, n)]
    targets = [(r + step) % n for step in range(1, n)]
    arriving = [wire.irecv(incoming[peer], peer) for peer in sources]
    leaving = [wire.isend(outgoing[peer], peer) for peer in targets]
    incoming[r].copy_(outgoing[r])
    for transfer in arriving + leaving:
        transfer.wait()
