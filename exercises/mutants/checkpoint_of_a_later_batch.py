"""A resumed run leaves out batches: the data position is that of the moment in which the thread wrote it."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from hybrid_parallel.checkpoint_pieces import Piece
from lab.launch.errors import WorkbookError

TARGET = "hybrid_parallel.checkpoint.BackgroundCheckpoints.save"
KILLER = (
    "tests.hybrid_parallel.test_checkpoint."
    "test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change"
)
CAUSE = "where the run is in its data"
SYMPTOM = "A resumed run leaves out some batches, and its losses differ from those of a run in one go."


def mutant(
    self,
    step: int,
    pieces: Iterable[Piece],
    extra: Mapping[str, Any],
    tied: Mapping[str, str] | None = None,
) -> None:
    if self._not_loaded is not None:
        raise WorkbookError(
            f"{self._folder} has the checkpoint of step {self._not_loaded}, from which this run has not "
            "started: resume from it, or name another folder"
        )
    self._finish_writing()
    if step == self._last_saved:
        return
    tensors = self._snapshot(pieces)
    self._saves += 1
    values = {"extra": extra, "tied": tied or {}}
    self._writer = threading.Thread(target=self._write, args=(step, tensors, values), daemon=True)
    self._writer.start()
