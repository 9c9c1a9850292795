"""Receives in time, and no deadlock. Write `receives_before` of pipeline_parallel/messages.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/messages.py yet: it has the solution.

You may use:

    placement(table: Table) -> dict[int, int]
        Return the rank of each stage; the stages are in order.
    received_by(action: Action, last_stage: int) -> Message | None
        Return the message that the action needs from another stage, or None.
    sent_by(action: Action, last_stage: int) -> Message | None
        Return the message with the action's result, or None if no other stage needs it.
    message.receiver: int
        The stage that receives it.

Check it with `python -m exercises check post_receives_early`.
"""

from collections import defaultdict, deque

from pipeline_parallel.actions import Table, placement
from pipeline_parallel.messages import Message, received_by, sent_by


def receives_before(table: Table, rank: int, ahead: int = 2) -> list[list[Message]]:
    """Return, for each action of the rank's row, the messages whose receives are posted before it.

    A receive is posted before the action that is `ahead` actions before the one that needs the
    message, or earlier, so that the receives from a rank are posted in the order of its sends: its
    k-th send meets the k-th receive, and with another order both ranks would wait. Stages of one
    rank send each other nothing. `placement(table)` has the rank of each stage.
    """
    raise NotImplementedError("`receives_before` is not written yet.")
