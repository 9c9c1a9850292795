"""Say which rank waits for which, when ranks hang: "rank 0 waits to send 40 bytes to rank 1 -> rank 1 ...".

A thread of a stuck rank looks at what the other threads are doing. An object that blocks in its method
`wait`, such as a message of comm, says for whom it waits if it has a method `awaited`.
"""

import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

TORCH_CALLS = {"send": ("send to", "dst"), "recv": ("receive from", "src")}


@dataclass(frozen=True)
class Wait:
    """One rank waits "to send 40 bytes to" the rank `peer`, perhaps inside a collective `operation`."""

    action: str
    peer: int
    operation: str = ""

    def __str__(self) -> str:
        inside = f" in {self.operation}" if self.operation else ""
        return f"{self.action} rank {self.peer}{inside}"


def current_wait() -> Wait | None:
    """Return for whom this process waits: its main thread or, if that waits for no rank, another thread."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    for thread in sorted(frames, key=lambda thread: thread != main):
        for frame, _ in traceback.walk_stack(frames[thread]):
            if (wait := _wait_in(frame)) is not None:
                return wait
    return None


def chain(waits: Mapping[int, Wait]) -> list[int]:
    """Return ranks of which each waits for the next one: a cycle if there is one, else the longest chain."""
    chains = []
    for start in waits:
        ranks = [start]
        while (peer := waits[ranks[-1]].peer) in waits and peer not in ranks:
            ranks.append(peer)
        if peer in ranks:
            return ranks[ranks.index(peer) :]
        chains.append(ranks)
    return max(chains, key=len, default=[])


def drawn(waits: Mapping[int, Wait]) -> str:
    """Return the cycle or the longest chain of ranks that wait for each other, in one line."""
    ranks = chain(waits)
    links = " -> ".join(f"rank {rank} waits to {waits[rank]}" for rank in ranks)
    last = waits[ranks[-1]].peer
    if last == ranks[0]:
        return f"a cycle, in which each rank waits for the next: {links}"
    return f"rank {last} keeps the others waiting: {links}"


def _wait_in(frame: FrameType) -> Wait | None:
    names, function = frame.f_locals, frame.f_code.co_name
    if function == "wait":
        awaited = getattr(names.get("self"), "awaited", None)
        return awaited() if callable(awaited) else None
    if function in TORCH_CALLS and frame.f_code.co_filename.endswith("distributed_c10d.py"):
        action, name = TORCH_CALLS[function]
        peer = names.get(name)
        return Wait(action, peer) if isinstance(peer, int) else None
    return None
