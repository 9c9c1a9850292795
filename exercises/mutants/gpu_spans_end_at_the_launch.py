"""On a GPU a step of a second shows milliseconds of compute, and most communication counts as hidden."""

from lab.trace import timeline

TARGET = "lab.trace.timeline.mark"
KILLER = (
    "tests.comm.test_native."
    "test_what_nccl_does_beside_the_backward_is_hidden_and_what_the_stream_waits_for_is_not"
)


def mutant() -> int:
    return timeline.now()
