"""The report says that a pipeline sends more than divided layers: the bytes of the two axes are exchanged."""

from comm.transport import wire
from comm.transport.wire import Group

TARGET = "comm.transport.wire.name_axis"
KILLER = "tests.hybrid_parallel.test_traffic.test_each_message_counts_for_the_axis_along_which_it_travels"
CAUSE = "have its own axis's name"


def mutant(group: Group, axis: str) -> None:
    exchanged = {"pipeline": "tensor", "tensor": "pipeline"}
    wire._axes[wire.group_of(group)] = exchanged.get(axis, axis)
