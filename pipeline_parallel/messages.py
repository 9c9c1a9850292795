"""Messages: what a table of actions makes the ranks send each other, derived by one pass.

      rank 0   F0 F1 B0 B1     ►   receive B0 · F0 · send F0 · receive B1 · F1 · send F1 · B0 · B1
      rank 1   F0 B0 F1 B1     ►   receive F0 · receive F1 · F0 · B0 · send B0 · F1 · B1 · send B1

An activation goes from a stage to the next one, a gradient to the one before; stages of one rank hand them
over without a message. Three rules keep ranks from waiting for each other for ever, and memory small:

  - A receive is posted early: `ahead` actions before the one that needs it, so that the message travels
    while something is computed. Two, because forwards and backwards alternate: what a neighbour made while
    this rank did one of each is there when the pair is done.
  - The k-th receive from a rank meets its k-th send. So receives of one neighbour are posted in the order in
    which that one sends, also where it is not the order of need.
  - A send never waits. Its memory is free once it has arrived, and a message that the receiver sends after it
    has used mine proves that mine has. So `Sent` stands before the action that needs such an answer, where
    it waits no longer than the action itself would; what has no answer is waited for at the end of the step.
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
    """An activation ("F", to the next stage) or a gradient ("I", to the one before) of `stage`'s making."""

    kind: str
    microbatch: int
    stage: int

    @property
    def receiver(self) -> int:
        """The stage that it is for."""
        return self.stage + (1 if self.kind == FORWARD else -1)


class Receive(NamedTuple):
    """Post the receive of a message from rank `peer`."""

    message: Message
    peer: int


class Send(NamedTuple):
    """Start sending a message to rank `peer`."""

    message: Message
    peer: int


class WaitForSend(NamedTuple):
    """Wait until the message has arrived, and its memory is free."""

    message: Message
    peer: int


Step = Action | Receive | Send | WaitForSend


def sent_by(action: Action, last_stage: int) -> Message | None:
    """What others need of the action's result."""
    kind, microbatch, stage = action
    if kind == FORWARD and stage < last_stage:
        return Message(FORWARD, microbatch, stage)
    if kind in (BACKWARD, INPUT_GRADIENT) and stage > 0:
        return Message(INPUT_GRADIENT, microbatch, stage)
    return None


def received_by(action: Action, last_stage: int) -> Message | None:
    """What the action needs of another stage."""
    kind, microbatch, stage = action
    if kind == FORWARD and stage > 0:
        return Message(FORWARD, microbatch, stage - 1)
    if kind in (BACKWARD, INPUT_GRADIENT) and stage < last_stage:
        return Message(INPUT_GRADIENT, microbatch, stage + 1)
    return None


def with_messages(table: Table, ahead: int = 2) -> list[list[Step]]:
    """Each rank's actions with its sends and receives among them. ValueError if `ahead` is negative."""
    if ahead < 0:
        raise ValueError(f"a receive cannot be posted {-ahead} actions late; `ahead` is 0 or more.")
    rank_of = placement(table)
    last_stage = max(rank_of, default=0)

    # Where a message is sent and needed: the place of the action in its rank's row. And what goes from one
    # rank to another, in the order in which it is sent.
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
    """Return who sends to whom: (source, destination) in ranks."""
    return {
        (rank, step.peer) for rank, steps in enumerate(programs) for step in steps if isinstance(step, Send)
    }


def has_split_backward(table: Table) -> bool:
    """Whether backwards are cut into input and weight gradients."""
    return any(action.kind == INPUT_GRADIENT for row in table for action in row)
