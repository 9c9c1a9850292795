"""A ring all-reduce of fewer elements than ranks sends empty messages, and each takes a latency."""

import torch

from comm.transport.wire import Wire

TARGET = "comm.algorithms.ring.shift"
KILLER = "tests.comm.test_collectives_by_hand.test_a_ring_starts_no_message_for_an_empty_tensor"
CAUSE = "is there nothing to send"
SYMPTOM = "On a ring a tensor with fewer elements than ranks takes more messages than it needs."


def mutant(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    arriving = wire.irecv(incoming, (wire.rank - 1) % wire.size)
    leaving = wire.isend(outgoing, (wire.rank + 1) % wire.size)
    for transfer in (arriving, leaving):
        transfer.wait()
