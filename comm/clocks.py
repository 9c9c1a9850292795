"""Bring the spans of all ranks together on one clock, that of rank 0.

      rank 0    ────────────── moment ───────────►  its clock       offset = moment - (sent + back) / 2
                              ▲      │
      rank 1    ─────── sent ─┘      └─► back ───►  its own clock

Processes and containers of one machine share its clock. For other machines the offset is measured as in NTP
(RFC 5905, section 8): the fastest of many round trips is the most exact.
"""

import json
from collections.abc import Callable, Iterable

import torch

from comm.exchange import exchange
from comm.wire.gloo_wire import peer_wire
from comm.wire.groups import message_device
from lab.launch.threads import machine_id
from lab.trace.gantt import Event
from lab.trace.timeline import now, recorded

_ROUNDS = 16


def gather_events(events: Iterable[Event] | None = None) -> list[Event]:
    """Return the events of all ranks, by default the recorded ones, sorted by their start on rank 0's clock.

    All ranks must call it. Values in `args` that JSON cannot represent arrive as strings.
    """
    own, offset = list(recorded() if events is None else events), clock_offset()
    own = [event._replace(start_ns=event.start_ns + offset) for event in own]
    gathered = [
        Event(*row)._replace(rank=rank)
        for rank, rows in enumerate(exchange(json.dumps(own, default=str)))
        for row in json.loads(rows)
    ]
    return sorted(gathered, key=lambda event: event.start_ns)


def clock_offset(clock: Callable[[], int] = now) -> int:
    """Return the nanoseconds to add to this rank's `clock` to get rank 0's. All ranks must call it."""
    machines = exchange(machine_id())
    far = [rank for rank, machine in enumerate(machines) if machine != machines[0]]
    wire = peer_wire(None, counted=False)
    ball = torch.zeros(1, dtype=torch.int64, device=message_device(None))
    if wire.rank == 0:
        for peer in [peer for peer in far for _ in range(_ROUNDS)]:
            wire.irecv(ball, peer).wait()
            ball.tolist()  # with nccl only this waits until the ball has arrived
            wire.isend(ball.fill_(clock()), peer).wait()
    trips = [(0, 0)]  # of each round trip, how long it took and the offset
    if wire.rank in far:
        trips.clear()
        for _ in range(_ROUNDS):
            sent = clock()
            wire.isend(ball, 0).wait()
            wire.irecv(ball, 0).wait()
            [moment], back = ball.tolist(), clock()
            trips.append((back - sent, moment - (sent + back) // 2))
    return min(trips)[1]
