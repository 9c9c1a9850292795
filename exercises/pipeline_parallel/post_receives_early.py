"""Receives in time, and no deadlock. Write `receives_before` of pipeline_parallel/messages.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/messages.py yet: it contains the
solution.

Messages: derive from a table of actions what the ranks send each other, and when they post the receives.

      rank 0   F0 F1 B0 B1     ►   receive B0 · F0 · send F0 · receive B1 · F1 · send F1 · B0 · B1
      rank 1   F0 B0 F1 B1     ►   receive F0 · receive F1 · F0 · B0 · send B0 · F1 · B1 · send B1

An activation goes from a stage to the next one, and a gradient to the stage before. Two stages of one rank
need no message. Three rules avoid a deadlock, in which ranks wait for each other without end:

  - A receive is posted early, `ahead` actions before the action that uses the message. So the message travels
    while the rank computes. `ahead` is 2, because forwards and backwards alternate: while this rank does one
    of each, the other rank makes the message.
  - The k-th receive from a rank meets its k-th send. So the receives from a rank are posted in the order of
    its sends, even if this rank needs the messages in another order.
  - A send does not wait. Its memory is free once the message has arrived, and an answer proves that: when the
    gradient of an activation comes back, the activation has been used.

You may use:

    Message(kind: str, microbatch: int, stage: int)
        Names an activation ("F", to the next stage) or a gradient ("I", to the stage before) of
        `stage`.
    message.receiver: int
        Return the stage that receives it.
    placement(table: Table) -> dict[int, int]
        Return the rank of each stage; the stages are in order.
    received_by(action: Action, last_stage: int) -> Message | None
        Return the message that the action needs from another stage, or None.
    sent_by(action: Action, last_stage: int) -> Message | None
        Return the message with the action's result, or None if no other stage needs it.
    Table = list[list[Action]]

Check it with `python -m exercises check post_receives_early`.
"""

from collections import defaultdict, deque

from pipeline_parallel.actions import Table, placement
from pipeline_parallel.messages import Message, received_by, sent_by


def receives_before(table: Table, rank: int, ahead: int = 2) -> list[list[Message]]:
    """Return, for each action of the rank's row, the messages whose receives are posted before it.

    The rules stand above. A receive is posted before the action that is `ahead` actions before the
    one that needs the message, or earlier, so that the receives from a rank are posted in the order
    of its sends. Stages of one rank send each other nothing. `placement(table)` has the rank of each
    stage.
    """
    raise NotImplementedError("`receives_before` is not written yet.")
