"""Stages receive the wrong tensors of the right shape: receives are not in the order of the sends."""

from pipeline_parallel.actions import Table, placement
from pipeline_parallel.messages import Receive, Send, Step, WaitForSend, received_by, sent_by

TARGET = "pipeline_parallel.messages.with_messages"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_messages_meet_the_receives_that_are_meant_for_them"
CAUSE = "receives must be posted in that order"


def mutant(table: Table, ahead: int = 1) -> list[list[Step]]:
    rank_of = placement(table)
    last_stage = max(rank_of)
    programs: list[list[Step]] = []
    for rank, row in enumerate(table):
        steps: list[Step] = []
        for action in row:
            needed, made = received_by(action, last_stage), sent_by(action, last_stage)
            if needed is not None and rank_of[needed.stage] != rank:
                steps.append(Receive(needed, rank_of[needed.stage]))
            steps.append(action)
            if made is not None and rank_of[made.receiver] != rank:
                steps.append(Send(made, rank_of[made.receiver]))
        sends = [step for step in steps if isinstance(step, Send)]
        programs.append(steps + [WaitForSend(*send) for send in sends])
    return programs
