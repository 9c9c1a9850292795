"""How long a step should take: the backward hands over gradients, a link carries them one after the other.

      compute   |   forward   |        backward        |            | step |
      ready                        r0    r1       r2
      link                         |  0  |  1  |  |  2  |
                                                       └── wait ────┘

Every lesson of this folder is a case of it: naive has all gradients ready at the end of the backward,
overlap has one message for each parameter, buckets fewer. Compute is measured, alpha and beta too; the
rest follows.
"""

import statistics
from collections.abc import Callable, Sequence

from lab.gantt import MAIN_LANE, Event
from lab.overlap import BLOCKED, busy, difference, intersection, total

Message = tuple[float, int]  # seconds of computing before it is ready, and its bytes


def step_seconds(
    compute: float, optimizer: float, messages: Sequence[Message], wire: Callable[[int], float]
) -> float:
    """Predicted seconds of a step.

    `compute` seconds of forward and backward, then `optimizer` seconds once the last message is through;
    `wire(num_bytes)` seconds for a message. Messages in the order in which they start.
    """
    free = 0.0
    for ready, num_bytes in messages:
        free = max(free, ready) + wire(num_bytes)
    return max(compute, free) + optimizer


def observed_step(events: Sequence[Event]) -> tuple[float, float, list[Message]]:
    """Compute, optimizer and messages of a step, from one rank's spans of it.

    Messages that a launch span announces are ready when it begins; others when all computing is done. What is
    sent after the optimizer has begun (the loss) is left out.
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


def median_step_seconds(steps: Sequence[Sequence[Event]], wire: Callable[[int], float]) -> float | None:
    """The median of the predictions for several steps; None without steps."""
    predictions = [step_seconds(*observed_step(events), wire) for events in steps]
    return statistics.median(predictions) if predictions else None
