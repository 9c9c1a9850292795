"""Kill ranks of an elastic training at chosen steps, so that one can see how the others go on."""

import dataclasses
import os
import signal
from collections.abc import Sequence

from lab.launch.errors import WorkbookError


@dataclasses.dataclass
class ElasticOptions:
    """Holds the options of elastic trainings: who dies, and how long the others wait."""

    kill: tuple[str, ...] = ()
    """RANK@STEP: the rank kills itself with SIGKILL just before it takes the step. Give several, such as
    2@20 1@40, to kill several ranks. RANK is the number of the rank at the start, also after another rank has
    died. STEP counts from 0. If rank 0 dies, the others end."""
    patience: float = 10.0
    """Number of seconds after which the others end, with a sentence, if a rank exists but does not answer."""


class Deaths:
    """Holds the deaths that `--kill` asks for. Raise WorkbookError where it names no rank or no step."""

    def __init__(self, kill: Sequence[str], world_size: int) -> None:
        self._deaths = set()
        for text in kill:
            rank, at, step = text.partition("@")
            if not (at and rank.isdecimal() and step.isdecimal() and int(rank) < world_size):
                raise WorkbookError(
                    f"--kill {text}: write RANK@STEP, with a rank from 0 to {world_size - 1}."
                )
            self._deaths.add((int(rank), int(step)))
        if len({rank for rank, _ in self._deaths}) == world_size:
            raise WorkbookError("--kill names all ranks; one must stay alive.")

    def die_if_due(self, name: int, step: int) -> None:
        """Kill this process if the rank that had the number `name` at the start shall die in this step."""
        if (name, step) in self._deaths:
            os.kill(os.getpid(), signal.SIGKILL)
