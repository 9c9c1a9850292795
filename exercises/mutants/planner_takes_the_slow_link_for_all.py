"""The planner avoids groups that cross nodes: of the network cards of a node one counts, instead of all."""

from comm.cost import Link
from hybrid_parallel.planner.machine import Machine

TARGET = "hybrid_parallel.planner.machine.Machine.link"
KILLER = (
    "tests.hybrid_parallel.test_planner_time."
    "test_a_link_across_nodes_is_as_fast_as_the_cards_that_the_group_has_in_a_node"
)


def mutant(self: Machine, ranks: int, stride: int) -> Link:
    return self.inner if (ranks - 1) * stride < self.devices_per_node else self.outer
