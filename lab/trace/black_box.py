"""Write down what a rank has communicated and where it is, in a file that is left if the rank hangs or dies.

    with black_box("dumps", rank):        # on every rank, around the training
        train()

PyTorch's flight recorder keeps the last 2000 collectives of each rank in memory (TORCH_FR_BUFFER_SIZE). gloo
records no send or recv; nccl records all. A hanging rank cannot write, so a thread writes the file `rank_0`
again and again, with where the rank is and how it ended. lab/trace/flight_recorder.py reads the files.
"""

import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

PREFIX = "rank_"
ADDED = "workbook"  # the key of what this file adds to PyTorch's dump

RUNNING, ENDED, FAILED = "running", "ended", "failed"

Place = tuple[str, int, str]  # file, line, function


@contextmanager
def black_box(folder: str | Path, rank: int, every: float = 0.5) -> Iterator[None]:
    """Write a dump of this rank into `folder` every `every` seconds, and at the end of the `with` block."""
    stop, watched = threading.Event(), threading.get_ident()

    def write_again_and_again() -> None:
        while not stop.wait(every):
            dump(folder, rank, places=_places(sys._current_frames().get(watched)))

    thread = threading.Thread(target=write_again_and_again, name="black box", daemon=True)
    thread.start()
    state, error, places = ENDED, "", []
    try:
        yield
    except BaseException as caught:
        state, error = FAILED, f"{type(caught).__name__}: {caught}".splitlines()[0]
        frames = traceback.extract_tb(caught.__traceback__)[::-1]
        places = [(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
        raise
    finally:
        stop.set()
        thread.join()  # it must not write a later file with an earlier state
        _wait_for_end_marks()
        dump(folder, rank, state, error, places)


def dump(
    folder: str | Path, rank: int, state: str = RUNNING, error: str = "", places: list[Place] | None = None
) -> Path:
    """Write PyTorch's recording of this rank to a file in `folder`, and return its path."""
    recording = _recorded()
    recording[ADDED] = {
        "rank": rank,
        "state": state,
        "error": error,
        "places": _places(sys._getframe(1)) if places is None else places,
        "groups": _groups(),
        "written_ns": time.time_ns(),
    }
    path = Path(folder) / f"{PREFIX}{rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader never sees half a file, also if this rank is killed now.
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_bytes(pickle.dumps(recording))
    new.replace(path)
    return path


def _wait_for_end_marks() -> None:
    """Wait, for 0.2 s at most, for PyTorch's marks: gloo marks a collective after it has woken the caller."""
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline and not all(one.get("retired", True) for one in _recorded()["entries"]):
        time.sleep(0.005)


def _recorded() -> dict[str, Any]:
    """Return what PyTorch has recorded: it keeps gloo's and nccl's collectives apart."""
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    both = [pickle.loads(getattr(c10d, name)()) for name in names if hasattr(c10d, name)]
    recording: dict[str, Any] = {}
    for one in both:
        recording.update({key: value for key, value in one.items() if key not in recording or value})
    recording["entries"] = [entry for one in both for entry in one.get("entries", [])]
    return recording


def _groups() -> dict[str, list[int]]:
    """Return the ranks of each group that this rank belongs to. PyTorch's dump has them for nccl alone."""
    world = dist.distributed_c10d._world
    return {name: list(world.pg_group_ranks[group]) for group, name in list(world.pg_names.items())}


def _places(frame: FrameType | None) -> list[Place]:
    places = []
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return places
