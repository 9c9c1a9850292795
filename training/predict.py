"""Predict how long a step takes: the backward makes gradients ready, and a link sends them one by one.

      compute   |   forward   |        backward        |            | step |
      ready                        r0    r1       r2
      link                         |  0  |  1  |  |        2        |
                                                       └── wait ────┘

Each script that all-reduces gradients is a special case. In naive data parallel all gradients are ready at
the end of the backward; with overlap there is a message for each parameter, with buckets there are fewer.
Compute, and the latency and speed of the link, are measured. The rest follows from the formula.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

from comm import cost
from comm.cost import Link
from lab.trace.gantt import MAIN_LANE, Event
from lab.trace.ledger import Entry, Traffic
from lab.trace.overlap import BLOCKED, busy, difference, intersection, total
from training.calibrate import LARGE_BYTES

Message = tuple[float, int]  # seconds of computing before it is ready, and its bytes


def step_seconds(
    compute: float, optimizer: float, messages: Sequence[Message], wire: Callable[[int], float]
) -> float:
    """Return the predicted seconds of a step, with `compute` seconds of forward and backward.

    The optimizer takes `optimizer` seconds after the last message has arrived. A message takes
    `wire(num_bytes)` seconds; `messages` are in the order in which they start.
    """
    free = 0.0
    for ready, num_bytes in messages:
        free = max(free, ready) + wire(num_bytes)
    return max(compute, free) + optimizer


def observed_step(events: Sequence[Event]) -> tuple[float, float, list[Message]]:
    """Return the seconds of compute and optimizer, and the messages, from one rank's spans of a step.

    A message with a launch span is ready when that span begins, the others when all compute is done. Messages
    after the start of the optimizer, such as the loss, are left out.
    """
    main = [event for event in events if event.lane == MAIN_LANE]
    blocked = busy(main, BLOCKED)
    computing = difference(busy(main, ("compute", "forward", "backward")), blocked)
    updating = busy(main, ("optimizer",))
    update_start = updating[0][0] if updating else max((e.end_ns for e in events), default=0)
    compute = total(computing)

    def computed_by(moment: int) -> float:
        return total(intersection(computing, [(0, moment)])) if moment > 0 else 0.0

    launches = sorted(event.start_ns for event in events if event.kind == "launch")
    carried = sorted(
        (e.start_ns, e.args["bytes"])
        for e in events
        if e.kind == "communication" and e.start_ns < update_start
    )
    messages = [
        (computed_by(launches[i]) if i < len(launches) else compute, num_bytes)
        for i, (_, num_bytes) in enumerate(carried)
    ]
    return compute, total(updating), messages


def predicted_seconds(
    steps: Sequence[Sequence[Event]], traffic: Mapping[Entry, Traffic], pattern: str, ranks: int, link: Link
) -> float | None:
    """Return the median of the predictions for several steps, from one rank's spans of each.

    None without steps, or where `traffic` has other messages than those of all-reduces.
    """
    if {entry.op for entry, sent in traffic.items() if sent.messages_sent} - {"all_reduce"}:
        return None
    pattern = cost.formula_of("all_reduce", cost.pattern_for("all_reduce", pattern, LARGE_BYTES))

    def wire(num_bytes: int) -> float:
        return cost.seconds("all_reduce", pattern, num_bytes, ranks, link)

    predictions = [step_seconds(*observed_step(events), wire) for events in steps]
    return statistics.median(predictions) if predictions else None
