"""Save and load the checkpoint of a run, in the same way for all lessons.

      what a lesson says                          what is done here
      FullState: the full state, and how a        rank 0 writes it into one file; it reads the file, sends
      rank takes its part of it                   the bytes to the others, and each takes its part
      ShardedState (data_parallel/                all ranks write what they own, in a folder that they share,
      sharded_checkpoint.py): what a rank owns    and later each reads what it owns (range_checkpoint.py)

The folder is validated and claimed before the first step. An error of one rank is an error of all. A
checkpoint of a run with other arguments, or one that already has all steps, is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from comm.collectives import broadcast
from comm.exchange import on_all, on_main
from lab import checkpoint
from lab.cluster import Cluster
from lab.launch.errors import Complete, WorkbookError
from training.validate import validate_folder, validate_shared_folder

Header = dict[str, Any]


class State(Protocol):
    """The state of a model and its optimizer, as this rank has it. All ranks make each call together."""

    def save(self, cluster: Cluster, folder: str, header: Header) -> None:
        """Write the state of all ranks and `header`. Returns when it is on disk."""

    def load(self, cluster: Cluster, folder: str, validate: Callable[[Header], None]) -> None:
        """Read a checkpoint, let `validate` refuse its header, and put the state in place."""


class FullState(NamedTuple):
    """State that is small enough for every rank to have all of it for a moment.

    `get` returns the full state on rank 0; all ranks call it, and may communicate. `put` gets the full state,
    loads this rank's part of it, and does not communicate.
    """

    get: Callable[[], dict[str, Any]]
    put: Callable[[dict[str, Any]], None]

    def save(self, cluster: Cluster, folder: str, header: Header) -> None:
        state = header | self.get()

        def write() -> None:
            checkpoint.save(Path(folder), state)

        on_main(cluster, f"save a checkpoint in {folder}", write)

    def load(self, cluster: Cluster, folder: str, validate: Callable[[Header], None]) -> None:
        state = _read_on_main(cluster, folder)

        def put() -> None:
            with checkpoint.refusing_misfits(folder):
                validate(state)
                self.put(state)

        on_all(f"resume from {folder}", put)


class Checkpoint:
    """The checkpoint of a run in `folder`. A run of other arguments (`made_with`) cannot go on from it."""

    def __init__(self, cluster: Cluster, folder: str, made_with: dict[str, Any]) -> None:
        self._cluster, self._folder, self._made_with = cluster, folder, made_with

    def prepare(self, is_shared: bool, resume: bool) -> None:
        """Refuse, on all ranks, a folder that no checkpoint can be saved in; let no other job save there.

        Otherwise the error would appear only after the training. `is_shared`: all ranks write in the folder.
        """
        folder = Path(self._folder)
        on_main(self._cluster, f"look into {folder}", lambda: checkpoint.refuse_hybrid(folder))
        validate = validate_shared_folder if is_shared else validate_folder
        validate(self._cluster, "--checkpoint", self._folder, resume)
        on_main(self._cluster, f"save in {folder}", lambda: checkpoint.claim(folder))

    def save(self, state: State, step: int) -> None:
        """Save the state after `step` steps. Raise WorkbookError on all ranks if that fails on one."""
        state.save(self._cluster, self._folder, {"made_with": self._made_with, "step": step})

    def exists(self) -> bool:
        """Return whether rank 0 finds a checkpoint in the folder; all ranks call it."""
        folder = Path(self._folder)
        return on_main(self._cluster, f"look into {folder}", lambda: checkpoint.exists(folder))

    def load(self, state: State, all_steps: int, may_be_complete: bool = False) -> int:
        """Load the checkpoint, and return its number of steps, which is less than `all_steps`.

        Raise Complete if it `may_be_complete` and has all steps.
        """
        steps = []

        def validate(header: Header) -> None:
            made_with = header.get("made_with", "another program")
            if made_with != self._made_with:
                raise WorkbookError(
                    f"The checkpoint was made with {made_with}, and this run has {self._made_with}; "
                    "give the same arguments, or another folder."
                )
            if not isinstance(header["step"], int) or header["step"] < 0:
                raise ValueError(f"its step is {header['step']}")
            if header["step"] >= all_steps and not may_be_complete:
                raise WorkbookError(
                    f"The checkpoint has {header['step']} steps already; ask for more with --steps."
                )
            steps.append(header["step"])

        state.load(self._cluster, self._folder, validate)
        if steps[0] >= all_steps:
            raise Complete(f"{self._folder} has a checkpoint of all {all_steps} steps; nothing is left.")
        return steps[0]


def _read_on_main(cluster: Cluster, folder: str) -> dict[str, Any]:
    """Return what rank 0 finds in `folder`, on every rank.

    Raise WorkbookError on all ranks if the checkpoint is damaged or missing. Ranks need not share a file
    system, so the bytes are sent over the group.
    """
    data, name = b"", str(Path(folder) / checkpoint.NAME)

    def look() -> int:
        nonlocal data
        data = checkpoint.read(Path(folder))
        checkpoint.unpack(data, name)
        return len(data)

    size = on_main(cluster, f"load {name}", look)
    message = torch.empty(size, dtype=torch.uint8, device=cluster.device)
    if cluster.is_main:
        message.copy_(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))
    broadcast(message)
    return checkpoint.unpack(message.cpu().numpy().tobytes(), name)
