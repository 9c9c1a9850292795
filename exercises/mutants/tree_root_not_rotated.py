"""A broadcast from rank 2 sends rank 0's tensor: a checkpoint that another rank has read is silently lost."""

from comm.transport.wire import Wire

TARGET = "comm.algorithms.tree.family"
KILLER = "tests.comm.test_collectives_by_hand.test_a_tree_broadcasts_from_every_root"
CAUSE = "such as the root"
SYMPTOM = "A broadcast from rank 2 does not send rank 2's tensor."


def mutant(wire: Wire, root: int) -> tuple[int | None, list[int]]:
    position = wire.rank
    reach = position & -position if position else 1 << (wire.size - 1).bit_length()
    parent = position - reach if position else None
    children = []
    while reach > 1:
        reach //= 2
        if position + reach < wire.size:
            children.append(position + reach)
    return parent, children
