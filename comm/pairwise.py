"""All-to-all, pairwise: everyone has something different for everyone, and sends it straight there.

rank 0: [a0 a1 a2]        rank 0: [a0 b0 c0]         A transpose. There is nothing to share or to
rank 1: [b0 b1 b2]   ──►  rank 1: [a1 b1 c1]         combine on the way, so each part crosses one
rank 2: [c0 c1 c2]        rank 2: [a2 b2 c2]         link once: (n-1)/n of the tensor.
"""

import torch

from comm.header import RowExchange
from comm.wire import Mismatch, Wire, names_of


def all_to_all(
    wire: Wire, output: torch.Tensor, full: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
) -> None:
    """Part p of `full` goes to rank p; part p of `output` comes from rank p. Sizes count elements."""
    _check_sizes(wire, out_sizes, in_sizes)
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


def _check_sizes(wire: Wire, out_sizes: list[int], in_sizes: list[int]) -> None:
    """Raises Mismatch on every rank unless what each sends is what the other expects."""
    table = (
        RowExchange(wire, torch.tensor([out_sizes, in_sizes]).flatten())
        .finish()
        .view(wire.size, 2, wire.size)
    )
    expected, sent = table[:, 0, :], table[:, 1, :].T
    wrong = (expected != sent).nonzero().tolist()
    if wrong:
        (to, by), names = wrong[0], names_of(wire.group)
        raise Mismatch(
            f"all_to_all: rank {names[by]} sends {int(sent[to, by])} elements to rank {names[to]}, "
            f"which expects {int(expected[to, by])}; input_sizes[p] on rank r must be output_sizes[r] on "
            "rank p."
        )
