"""Say in words why ranks hang, from what each of them waits for."""

import re

from exercises.evidence import Evidence
from lab.ranks.waiting import chain

_STARTS_TO_RECEIVE = re.compile(r"rank (\d+) is stuck at \S*wire\.py:\d+ in irecv\b")


def no_such_rank(e: Evidence) -> str | None:
    """Find a message from or to a rank that does not exist.

    Only from such a rank a receive blocks as it starts, and a send to such a rank kills the process.
    """
    if found := _STARTS_TO_RECEIVE.search(e.text):
        return (
            f"Rank {found[1]} receives from a rank that does not exist. Ranks have the numbers 0 to n-1, so "
            "there is no rank -1: is a modulo missing, as in `(rank - 1) % n`?"
        )
    if "was killed by SIGSEGV" in e.text:
        return (
            "A send to a rank that does not exist can end a process like this. Ranks have the numbers 0 to "
            "n-1: is a modulo missing, as in `(rank + 1) % n`?"
        )
    return None


def unmoved(e: Evidence) -> str | None:
    """Find two ranks of which each has posted a send and a receive to the other one, and waits for one."""
    if not e.waits or not e.mentions("more than fits on the way"):
        return None
    return (
        "A deadlock: each rank has a message that has not left, and one that has not arrived. While it waits "
        "for one of them, it must move all of its messages. If it takes nothing before its own send has "
        "left, the other rank's send cannot leave either."
    )


def hang(e: Evidence) -> str | None:
    """Return the likely cause of a hang, or None if no rank waits."""
    waits = e.who_waits()
    if not waits:
        return None
    ranks = chain(waits)
    is_cycle = waits[ranks[-1]].peer == ranks[0]
    if not is_cycle:
        awaited = waits[ranks[-1]]
        last = awaited.peer
        if not e.waits:  # only some ranks have said for whom they waited
            return f"A deadlock, or rank {last} never takes part: do both ranks reach this message?"
        if "a header" in awaited.action:
            return (
                f"Rank {last} has not called {awaited.operation}: each rank sends a header as it begins a "
                "collective, and this one has not come. Does the rank return early, leave out the call, or "
                "wait elsewhere?"
            )
        return (
            f"Rank {last} never takes part: does it return early, leave out a call, or start a message "
            "without waiting for it?"
        )
    if any("a header" in waits[rank].action for rank in ranks):
        return (
            "A deadlock: a rank sends a header as it begins a collective, and the ranks of the cycle wait in "
            "different calls. Do all ranks call the same collectives in the same order?"
        )
    actions = {waits[rank].action.partition(" ")[0] for rank in ranks}
    if actions == {"send"}:
        return (
            "A deadlock: each rank of the cycle sends first and none receives. Let one receive first, or "
            "start the receive with irecv before you wait for the send."
        )
    if actions == {"receive"}:
        return (
            "A deadlock: each rank of the cycle receives first and none has sent. Does a send come too late?"
        )
    other = "What looks like one message here are two different ones. " if len(ranks) == 2 else ""
    return (
        "A deadlock: the ranks do their sends and receives in different orders, so a send never meets its "
        f"receive. {other}Is there one receive for each send, from the same rank and in the same order? Does "
        "a rank skip its receive, perhaps one from rank 0, because 0 counts as False?"
    )
