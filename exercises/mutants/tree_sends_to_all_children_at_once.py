"""A broadcast by tree is slower than its formula: a rank's messages share its link, and all arrive late."""

import torch

from comm.algorithms.tree import family
from comm.transport.wire import Wire

TARGET = "comm.algorithms.tree.broadcast"
KILLER = (
    "tests.comm.test_collectives_by_hand."
    "test_a_tree_sends_to_the_largest_subtree_first_and_to_one_child_at_a_time"
)
CAUSE = "Does something start too early"
SYMPTOM = "A broadcast of a large tensor by tree takes longer than its formula says, on links of one speed."


def mutant(wire: Wire, tensor: torch.Tensor, root: int) -> None:
    if tensor.numel() == 0:
        return
    parent, children = family(wire, root)
    if parent is not None:
        wire.irecv(tensor, parent).wait()
    for transfer in [wire.isend(tensor, child) for child in children]:
        transfer.wait()
