"""Save a training checkpoint as one file that is always complete, whenever the job is killed.

    save(directory, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})

    data = read(directory)                   # rank 0 reads, and sends the bytes to the others
    state = unpack(data, f"the checkpoint in {directory}")

The new file is written beside the old one and then renamed to its name. The file system renames completely or
not at all. The file ends with the SHA-256 of all bytes before it, so loading detects a changed bit;
torch.load ignores that line. Loading runs no code from the file, which may hold tensors, numbers, strings,
and lists, tuples and dicts of them.
"""

import hashlib
import io
import os
import pickle
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lab.launch.errors import WorkbookError, reason

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = "checkpoint.pt"

_claims: dict[tuple[int, int], int] = {}  # st_dev and st_ino of a directory -> its open descriptor


def save(directory: Path, state: dict[str, Any]) -> Path:
    """Write `state` to `checkpoint.pt` in `directory`, which is created if needed, and return the path.

    Raise WorkbookError if the file cannot be written or another process saves there, and TypeError if `state`
    holds an object that `unpack` would refuse. After any error an older checkpoint is unchanged.
    """
    try:
        claim(directory)
        for abandoned in directory.glob(f"{NAME}.partial*"):  # left by a killed job
            abandoned.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_save(directory / NAME, error) from error
    return write(directory, state)


def write(directory: Path, state: dict[str, Any]) -> Path:
    """Write `state` as `save` does, to an existing directory that this process has claimed or created."""
    path = directory / NAME
    partial = directory / f"{NAME}.partial-{secrets.token_hex(4)}"
    try:
        with partial.open("w+b") as file:
            torch.save(state, file)
            file.seek(0)
            file.write(seal(hashlib.file_digest(file, "sha256")))
            file.flush()
            os.fsync(file.fileno())
        _check_loads(partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        on_disk = disk_error(error)
        if on_disk is None:
            raise
        raise _cannot_save(path, on_disk) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


def _cannot_save(path: Path, error: OSError) -> WorkbookError:
    return WorkbookError(f"cannot save the checkpoint {path}: {error.strerror or error}")


def claim(directory: Path) -> None:
    """Create `directory` if needed, and let no other process save there until this process ends.

    Raise WorkbookError if another process has claimed it: two jobs would replace each other's checkpoints. On
    a file system that cannot lock a directory (NFS) this is not detected.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        return
    descriptor = os.open(directory, os.O_RDONLY)
    found = os.fstat(descriptor)
    if (found.st_dev, found.st_ino) in _claims:
        os.close(descriptor)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WorkbookError(
            f"another job saves its checkpoints in {directory}: choose another folder, or wait until it ends"
        ) from None
    except OSError:
        pass  # this file system has no locks
    _claims[found.st_dev, found.st_ino] = descriptor


def read(directory: Path) -> bytes:
    """Return the bytes of the checkpoint in `directory`. Raise WorkbookError if it cannot be read."""
    path = directory / NAME
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise nothing_in(directory) from None
    except OSError as error:
        raise WorkbookError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error


def unpack(data: bytes, name: str) -> dict[str, Any]:
    """Return the state that was saved, with its tensors on the CPU.

    Raise WorkbookError if a bit has changed or the data is no checkpoint. The error calls the data `name`.
    """
    try:
        if data[-SEAL_BYTES:] != seal(hashlib.sha256(memoryview(data)[:-SEAL_BYTES])):
            raise ValueError("its SHA-256 is not the one at its end")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # unknown bytes may raise any error
        raise WorkbookError(f"{name} is damaged, or is no checkpoint: resume from another one") from error
    if not isinstance(state, dict):
        raise WorkbookError(f"{name} holds a {type(state).__name__} instead of a training state")
    return state


def seal(digest: Any) -> bytes:
    """Return the last line of a checkpoint, from the SHA-256 object of all bytes before it."""
    return f"\nsha256 {digest.hexdigest()}\n".encode()


SEAL_BYTES = len(seal(hashlib.sha256()))


@contextmanager
def refusing_misfits(name: object) -> Iterator[None]:
    """In a `with` block that loads a state, turn errors into a WorkbookError: `name` does not fit this run.

    The bytes are undamaged, but another program, or an older version of this one, may have saved them.
    """
    try:
        yield
    except (WorkbookError, torch.OutOfMemoryError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        what = f"{type(error).__name__}: {reason(error)}"
        raise WorkbookError(
            f"{name} does not hold what this run saves ({what}): resume from another one"
        ) from error


def exists(directory: Path) -> bool:
    """Return whether `directory` holds a complete checkpoint: one file, or the folder of one in several."""
    return any(".partial" not in path.name for path in directory.glob("checkpoint[.-]*"))


def refuse_hybrid(directory: Path) -> None:
    """Raise WorkbookError if `directory` holds a checkpoint of the hybrid training, in its own format."""
    for manifest in directory.glob("step-*/manifest"):
        raise WorkbookError(
            f"{directory} holds {manifest.parent.name}, a checkpoint of the hybrid training, and this script "
            "cannot read it: name another folder"
        )


def nothing_in(directory: Path) -> WorkbookError:
    """Return the error for a directory without a checkpoint."""
    return WorkbookError(
        f"There is no checkpoint in {directory} to resume from; name the directory of an earlier run, "
        "or leave out --resume."
    )


def disk_error(error: OSError | RuntimeError) -> OSError | None:
    """Return the OSError of the disk that caused an error of torch.save, or None if there is none.

    After an OSError torch.save closes its archive. On a full disk this fails too, and hides the first error.
    """
    behind = error if isinstance(error, OSError) else error.__context__
    return behind if isinstance(behind, OSError) else None


def _check_loads(path: Path) -> None:
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # mmap: reads no tensor's data
    except pickle.UnpicklingError as error:
        raise TypeError(
            "a checkpoint takes tensors, numbers, strings, and lists, tuples and dicts of them, nothing else"
        ) from error
