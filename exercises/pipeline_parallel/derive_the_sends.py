"""Deriving the messages from a table. Write `sent_by` and `received_by` of pipeline_parallel/messages.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/messages.py yet: it has the solution.

You may use:

    Message(kind: str, microbatch: int, stage: int)
        Names an activation ("F", to the next stage) or a gradient ("I", to the stage before) of
        `stage`.

Check it with `python -m exercises check derive_the_sends`.
"""

from pipeline_parallel.actions import BACKWARD, FORWARD, INPUT_GRADIENT, Action
from pipeline_parallel.messages import Message


def sent_by(action: Action, last_stage: int) -> Message | None:
    """Return the message with the action's result, or None if no other stage needs it.

    A message names what it carries: Message(FORWARD, microbatch, stage) is the output of that stage,
    and Message(INPUT_GRADIENT, microbatch, stage) the gradient of its input.
    """
    raise NotImplementedError("`sent_by` is not written yet.")


def received_by(action: Action, last_stage: int) -> Message | None:
    """Return the message that the action needs from another stage, or None."""
    raise NotImplementedError("`received_by` is not written yet.")
