"""Each rank loses its own part of an all-to-all: there is no message for it, and no copy either."""

import torch

from comm.transport.wire import Wire

TARGET = "comm.algorithms.pairwise.all_to_all"
KILLER = "tests.comm.test_narrated.test_pairwise_all_to_all_equals_one_process"
CAUSE = "one part left out"
SYMPTOM = "After an all-to-all a part of the result is garbage."


def mutant(
    wire: Wire, output: torch.Tensor, full: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
) -> None:
    outgoing, incoming = full.split(in_sizes), output.split(out_sizes)
    peers = [peer for peer in range(wire.size) if peer != wire.rank]
    arriving = [wire.irecv(incoming[peer], peer) for peer in peers if out_sizes[peer]]
    leaving = [wire.isend(outgoing[peer], peer) for peer in peers if in_sizes[peer]]
    for transfer in arriving + leaving:
        transfer.wait()
