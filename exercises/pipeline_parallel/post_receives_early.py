"""Receives in time, and no deadlock. Write `with_messages` of pipeline_parallel/messages.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/messages.py yet: it contains the
solution. All that you need is in this file, in the notebook and in the hints.

Messages: derive from a table of actions what the ranks send each other.

      rank 0   F0 F1 B0 B1     ►   receive B0 · F0 · send F0 · receive B1 · F1 · send F1 · B0 · B1
      rank 1   F0 B0 F1 B1     ►   receive F0 · receive F1 · F0 · B0 · send B0 · F1 · B1 · send B1

An activation goes from a stage to the next one, and a gradient to the stage before. Two stages of one rank
need no message. Three rules avoid a deadlock, in which ranks wait for each other without end, and keep memory
small:

  - A receive is posted early, `ahead` actions before the action that uses the message. So the message travels
    while the rank computes. `ahead` is 2, because forwards and backwards alternate: while this rank does one
    of each, the other rank makes the message.
  - The k-th receive from a rank meets its k-th send. So the receives from a rank are posted in the order of
    its sends, even if this rank needs the messages in another order.
  - A send does not wait, and its memory is free once the message has arrived. An answer proves the arrival: a
    message that the receiver sends after it has used this one. So `WaitForSend` stands before the action
    that needs the answer, and takes no longer than this action waits anyway. The end of the step waits for
    the messages without an answer.

You may use:

    Action(kind: str, microbatch: int, stage: int)
        Holds one action: a forward, a backward or half of a backward, of one microbatch in one stage.
    Message(kind: str, microbatch: int, stage: int)
        Names an activation ("F", to the next stage) or a gradient ("I", to the stage before) of
        `stage`.
    message.receiver: int
        Return the stage that receives it.
    placement(table: Table) -> dict[int, int]
        Return the rank of each stage; the stages are in order.
    Receive(message: Message, peer: int)
        Posts the receive of a message from rank `peer`.
    received_by(action: Action, last_stage: int) -> Message | None
        Return the message that the action needs from another stage, or None.
    Send(message: Message, peer: int)
        Starts sending a message to rank `peer`.
    sent_by(action: Action, last_stage: int) -> Message | None
        Return the message with the action's result, or None if no other stage needs it.
    Step = Action | Receive | Send | WaitForSend
    Table = list[list[Action]]
    WaitForSend(message: Message, peer: int)
        Waits until a message has arrived, so that its memory is free.

Check it with `python -m exercises check post_receives_early`.
"""

from collections import defaultdict, deque

from pipeline_parallel.actions import Action, Table, placement
from pipeline_parallel.messages import Message, Receive, Send, Step, WaitForSend, received_by, sent_by


def with_messages(table: Table, ahead: int = 2) -> list[list[Step]]:
    """Return each rank's actions, sends and receives in order. ValueError if `ahead` is negative.

    The three rules above say where Receive, Send and
    WaitForSend stand. Send(message, peer) follows the action that makes the message. Receive(message,
    peer) stands before the action that is `ahead` actions before the one that needs the message, or
    earlier, so that the receives from a rank are posted in the order of its sends. WaitForSend stands
    before the first action that needs an answer: a message that its receiver sends after it has used
    this one; without an answer, at the end. Stages of one rank send each other nothing. The error: A
    receive cannot be posted {-ahead} actions late: make `ahead` 0 or more.
    """
    raise NotImplementedError(
        "Receives in time, and no deadlock is not written yet: `with_messages` has no body."
    )
