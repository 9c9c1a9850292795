"""Messages: derive from a table of actions what the ranks send each other.

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
"""

from collections import defaultdict, deque
from typing import NamedTuple

from pipeline_parallel.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    Action,
    Table,
    placement,
)


class Message(NamedTuple):
    """Names an activation ("F", to the next stage) or a gradient ("I", to the stage before) of `stage`."""

    kind: str
    microbatch: int
    stage: int

    @property
    def receiver(self) -> int:
        """Return the stage that receives it."""
        return self.stage + (1 if self.kind == FORWARD else -1)


class Receive(NamedTuple):
    """Posts the receive of a message from rank `peer`."""

    message: Message
    peer: int


class Send(NamedTuple):
    """Starts sending a message to rank `peer`."""

    message: Message
    peer: int


class WaitForSend(NamedTuple):
    """Waits until a message has arrived, so that its memory is free."""

    message: Message
    peer: int


Step = Action | Receive | Send | WaitForSend


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


def with_messages(table: Table, ahead: int = 2) -> list[list[Step]]:
    """Return each rank's actions, sends and receives in order. ValueError if `ahead` is negative."""
    if ahead < 0:
        raise ValueError(f"A receive cannot be posted {-ahead} actions late: make `ahead` 0 or more.")
    rank_of = placement(table)
    last_stage = max(rank_of, default=0)

    # For each message, the position in the row of the action that sends it, and of the one that needs it.
    # For each pair of ranks, their messages in the order of sending.
    sent_at: dict[Message, int] = {}
    needed_at: dict[Message, int] = {}
    traffic: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, row in enumerate(table):
        for at, action in enumerate(row):
            made, needed = sent_by(action, last_stage), received_by(action, last_stage)
            if made is not None and rank_of[made.receiver] != rank:
                traffic[rank, rank_of[made.receiver]].append(made)
                sent_at[made] = at
            if needed is not None and rank_of[needed.stage] != rank:
                needed_at[needed] = at

    def program(rank: int, row: list[Action]) -> list[Step]:
        steps: list[Step] = []
        arriving = [message if message in needed_at else None for message in map(needs_message, row)]
        not_posted = {source: deque(queue) for (source, to), queue in traffic.items() if to == rank}
        not_proven = {
            peer: deque(sorted(queue, key=needed_at.__getitem__))
            for (source, peer), queue in traffic.items()
            if source == rank
        }
        posted: set[Message] = set()
        for at, action in enumerate(row):
            for message in filter(None, arriving[at : at + ahead + 1]):
                source = rank_of[message.stage]
                while message not in posted:
                    posted.add(following := not_posted[source].popleft())
                    steps.append(Receive(following, source))
            if (answer := arriving[at]) is not None:
                mine = not_proven.get(peer := rank_of[answer.stage], deque())
                while mine and needed_at[mine[0]] <= sent_at[answer]:
                    steps.append(WaitForSend(mine.popleft(), peer))
            steps.append(action)
            if (made := sent_by(action, last_stage)) in sent_at:
                steps.append(Send(made, rank_of[made.receiver]))
        return steps + [WaitForSend(message, peer) for peer, mine in not_proven.items() for message in mine]

    def needs_message(action: Action) -> Message | None:
        return received_by(action, last_stage)

    return [program(rank, row) for rank, row in enumerate(table)]


def neighbours(programs: list[list[Step]]) -> set[tuple[int, int]]:
    """Return the pairs of ranks (source, destination) that exchange messages."""
    return {
        (rank, step.peer) for rank, steps in enumerate(programs) for step in steps if isinstance(step, Send)
    }


def has_split_backward(table: Table) -> bool:
    """Return whether backwards are cut into input and weight gradients."""
    return any(action.kind == INPUT_GRADIENT for row in table for action in row)
