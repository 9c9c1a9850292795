"""A training checkpoint: one file that is always whole, whenever the job is killed.

    save(directory, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})

    data = read(directory)                   # rank 0 reads, and sends the bytes to the others
    state = unpack(data, f"the checkpoint in {directory}")

The new file is written beside the old one and then takes its name, which the file system does at once or not
at all. Loading runs no code from the file: tensors, numbers, strings, and lists, tuples and dicts of them.
"""

import io
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lab.errors import WorkbookError

NAME = "checkpoint.pt"


def save(directory: Path, state: dict[str, Any]) -> Path:
    """Write `state` to `checkpoint.pt` in `directory`, made if need be, and return the file's path.

    WorkbookError if the file cannot be written, TypeError if `state` holds what `unpack` would refuse.
    Whatever is raised, an older checkpoint is as it was. Only one process may save to a directory.
    """
    path = directory / NAME
    partial = directory / f"{NAME}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _check_loads(partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        reason = disk_error(error)
        if reason is None:
            raise
        raise WorkbookError(f"cannot save the checkpoint {path}: {reason.strerror or reason}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


def read(directory: Path) -> bytes:
    """The bytes of the checkpoint in `directory`. WorkbookError if there is none, or it cannot be read."""
    path = directory / NAME
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise nothing_in(directory) from None
    except OSError as error:
        raise WorkbookError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error


def unpack(data: bytes, name: str) -> dict[str, Any]:
    """The state that `save` was given, its tensors on the CPU.

    WorkbookError, which calls the data `name`, if it is truncated or no checkpoint at all.
    """
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # bytes of any origin fail in any way
        raise WorkbookError(f"{name} is damaged, or is no checkpoint: resume from another one") from error
    if not isinstance(state, dict):
        raise WorkbookError(f"{name} holds a {type(state).__name__} instead of a training state")
    return state


def nothing_in(directory: Path) -> WorkbookError:
    """The error of one who looks for a checkpoint in `directory`."""
    return WorkbookError(
        f"There is no checkpoint in {directory} to resume from; name the directory of an earlier run, "
        "or start anew."
    )


def disk_error(error: OSError | RuntimeError) -> OSError | None:
    """The disk's own error behind what torch.save has raised; None if it was another matter.

    torch.save closes its archive before it lets an error pass; on a full disk that fails as well.
    """
    reason = error if isinstance(error, OSError) else error.__context__
    return reason if isinstance(reason, OSError) else None


def _check_loads(path: Path) -> None:
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # mmap: reads no tensor's data
    except pickle.UnpicklingError as error:
        raise TypeError(
            "a checkpoint takes tensors, numbers, strings, and lists, tuples and dicts of them, nothing else"
        ) from error
