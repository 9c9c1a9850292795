"""Messages: derive from a table of actions what the ranks send each other, and when they post the receives.

      rank 0   F0 F1 B0 B1     ►   receive B0 · F0 · send F0 · receive B1 · F1 · send F1 · B0 · B1
      rank 1   F0 B0 F1 B1     ►   receive F0 · receive F1 · F0 · B0 · send B0 · F1 · B1 · send B1

An activation goes from a stage to the next one, and a gradient to the stage before. Two stages of one rank
need no message. Three rules avoid a deadlock, in which ranks wait for each other without end:

  - A receive is posted early, `ahead` actions before the action that uses the message. So the message travels
    while the rank computes. `ahead` is 2, because forwards and backwards alternate: while this rank does one
    of each, the other rank makes the message.
  - The k-th receive from a rank meets its k-th send. So the receives from a rank are posted in the order of
    its sends, even if this rank needs the messages in another order.
  - A send does not wait. Its memory is free once the message has arrived, and an answer proves that: what its
    receiver has made afterwards, such as the gradient of an activation.
"""

from collections import defaultdict, deque
from typing import NamedTuple

from pipeline_parallel.actions import BACKWARD, FORWARD, INPUT_GRADIENT, Action, Table, placement


class Message(NamedTuple):
    """Names an activation ("F", to the next stage) or a gradient ("I", to the stage before) of `stage`."""

    kind: str
    microbatch: int
    stage: int

    @property
    def receiver(self) -> int:
        """Return the stage that receives it."""
        return self.stage + (1 if self.kind == FORWARD else -1)


def sent_by(action: Action, last_stage: int) -> Message | None:
    """Return the message with the action's result, or None if no other stage needs it."""
    kind, microbatch, stage = action
    if kind == FORWARD and stage < last_stage:
        return Message(FORWARD, microbatch, stage)
    if kind in (BACKWARD, INPUT_GRADIENT) and stage > 0:
        return Message(INPUT_GRADIENT, microbatch, stage)
    return None


def received_by(action: Action, last_stage: int) -> Message | None:
    """Return the message that the action needs from another stage, or None."""
    kind, microbatch, stage = action
    if kind == FORWARD and stage > 0:
        return Message(FORWARD, microbatch, stage - 1)
    if kind in (BACKWARD, INPUT_GRADIENT) and stage < last_stage:
        return Message(INPUT_GRADIENT, microbatch, stage + 1)
    return None


def receives_before(table: Table, rank: int, ahead: int = 2) -> list[list[Message]]:
    """Return, for each action of the rank's row, the messages whose receives are posted before it."""
    rank_of, row = placement(table), table[rank]
    last_stage = max(rank_of)
    coming: defaultdict[int, deque[Message]] = defaultdict(deque)  # from each rank, in the order of its sends
    for sender, actions in enumerate(table):
        for message in (sent_by(action, last_stage) for action in actions):
            if sender != rank and message is not None and rank_of[message.receiver] == rank:
                coming[sender].append(message)
    needed = [received_by(action, last_stage) for action in row]
    receives: list[list[Message]] = []
    for at in range(len(row)):
        posted: list[Message] = []
        for message in needed[at : at + ahead + 1]:
            queue = coming[rank_of[message.stage]] if message is not None else deque()
            while message in queue:  # its receive and all that must be posted before
                posted.append(queue.popleft())
        receives.append(posted)
    return receives


def proven_by(table: Table, rank: int) -> dict[Message, list[Message]]:
    """Return for each message that arrives which of the rank's own messages must have been used before it."""
    rank_of = placement(table)
    last_stage = max(rank_of)
    proven: dict[Message, list[Message]] = {}
    for peer, row in enumerate(table):
        used: list[Message] = []
        for action in row if peer != rank else []:
            needed, made = received_by(action, last_stage), sent_by(action, last_stage)
            if needed is not None and rank_of[needed.stage] == rank:
                used.append(needed)
            if made is not None and rank_of[made.receiver] == rank:
                proven[made], used = used, []
    return proven
