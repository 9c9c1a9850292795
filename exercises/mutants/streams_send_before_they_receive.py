"""Two ranks that send each other large tensors hang: each takes nothing until its own send has left."""

TARGET = "comm.transport.streams.Streams._move"
KILLER = "tests.comm.test_progress.test_two_ranks_that_send_each_other_more_than_fits_on_the_way_both_go_on"
FAILS_WITH = "no answer within"
CAUSE = "must move all of its messages"
SYMPTOM = "Small tensors are right, and with large ones all ranks hang."


def mutant(self) -> bool:
    moved = False
    for peer in self._all:
        try:
            if peer.out is not None and peer.out.is_busy and not peer.has_left:
                moved |= peer.out.push()
            else:
                moved |= peer.pull()
        except OSError:
            moved |= not peer.has_left
            peer.has_left = True
    if moved:
        self._deadline = 0.0
    return moved
