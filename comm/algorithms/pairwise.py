"""All-to-all, pairwise: everyone has something different for everyone, and sends it straight there.

rank 0: [a0 a1 a2]        rank 0: [a0 b0 c0]         A transpose. There is nothing to share or to
rank 1: [b0 b1 b2]   ──►  rank 1: [a1 b1 c1]         combine on the way, so each part crosses one
rank 2: [c0 c1 c2]        rank 2: [a2 b2 c2]         link once: (n-1)/n of the tensor.
"""

import torch

from comm.transport.wire import Wire


def all_to_all(
    wire: Wire, output: torch.Tensor, full: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
) -> None:
    """Part p of `full` goes to rank p; part p of `output` comes from rank p. Sizes count elements."""
    n, r = wire.size, wire.rank
    outgoing, incoming = full.split(in_sizes), output.split(out_sizes)
    # Everyone starts with another partner, so that no rank is sent to by all at once.
    sources = [(r - step) % n for step in range(1, n)]
    targets = [(r + step) % n for step in range(1, n)]
    arriving = [wire.irecv(incoming[peer], peer) for peer in sources if out_sizes[peer]]
    leaving = [wire.isend(outgoing[peer], peer) for peer in targets if in_sizes[peer]]
    incoming[r].copy_(outgoing[r])
    for transfer in arriving + leaving:
        transfer.wait()
