"""Say whether a right solution is as good as can be (targets.py)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Say whether a solution is as good as can be, in a sentence with the numbers."""

    is_met: bool
    sentence: str
