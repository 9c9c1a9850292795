"""The report says that all communication is hidden, though the backward stands still for each all-reduce."""

from collections.abc import Sequence

from lab.trace.gantt import MAIN_LANE, Event
from lab.trace.overlap import COMMUNICATION, COMPUTE, Overlap, busy, intersection, total

TARGET = "lab.trace.overlap.overlap_of"
KILLER = "tests.lab.test_overlap.test_a_blocking_all_reduce_inside_the_backward_hides_nothing"


def mutant(events: Sequence[Event]) -> Overlap:
    compute = busy([event for event in events if event.lane == MAIN_LANE], COMPUTE)
    communication = busy(events, COMMUNICATION)
    return Overlap(total(compute), total(communication), total(intersection(communication, compute)))
