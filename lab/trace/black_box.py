"""Write down what a rank has communicated and where it is, in a file that is left if the rank hangs or dies.

    with black_box("dumps", rank):        # on every rank, around the training
        train()

PyTorch's flight recorder keeps the last 2000 collectives of each rank in memory (TORCH_FR_BUFFER_SIZE). gloo
records no send or recv; nccl records all. A hanging rank cannot write, so a thread writes the file `rank_0`
again and again, with where the rank is and how it ended. lab/trace/flight_recorder.py reads the files.
"""

import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

RUNNING, ENDED, FAILED = "running", "ended", "failed"

Place = tuple[str, int, str]  # file, line, function


@contextmanager
def black_box(folder: str | Path, rank: int, every: float = 0.5) -> Iterator[None]:
    """Write a dump of this rank into `folder` every `every` seconds, and at the end of the `with` block."""
    stop, watched = threading.Event(), threading.get_ident()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def write_again_and_again() -> None:
        if device is not None:  # a thread starts with device 0, and would open a context there
            torch.cuda.set_device(device)
        while not stop.wait(every):
            stack = traceback.extract_stack(sys._current_frames()[watched])
            _dump(folder, rank, RUNNING, "", stack)

    thread = threading.Thread(target=write_again_and_again, name="black box", daemon=True)
    thread.start()
    state, error, stack = ENDED, "", traceback.StackSummary()
    try:
        yield
    except BaseException as caught:
        state, error = FAILED, f"{type(caught).__name__}: {caught}".splitlines()[0]
        stack = traceback.extract_tb(caught.__traceback__)
        raise
    finally:
        stop.set()
        thread.join()  # it must not write a later file with an earlier state
        _wait_for_end_marks()
        _dump(folder, rank, state, error, stack)


def _dump(folder: str | Path, rank: int, state: str, error: str, stack: traceback.StackSummary) -> None:
    world = dist.distributed_c10d._world
    recording = {
        "rank": rank,
        "state": state,
        "error": error,
        "place": _own_place((one.filename, one.lineno or 0, one.name) for one in reversed(stack)),
        "groups": {name: list(world.pg_group_ranks[group]) for group, name in list(world.pg_names.items())},
        "calls": [_call(entry) for entry in _recorded() if not entry["is_p2p"]],
    }
    path = Path(folder) / f"rank_{rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader never sees half a file, also if this rank is killed now.
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(json.dumps(recording))
    new.replace(path)


def _wait_for_end_marks() -> None:
    """Wait, for 0.2 s at most, for PyTorch's marks: gloo marks a collective after it has woken the caller."""
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline and not all(entry.get("retired", True) for entry in _recorded()):
        time.sleep(0.005)


def _recorded() -> list[dict[str, Any]]:
    """Return what PyTorch has recorded: it keeps gloo's and nccl's collectives apart."""
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    dumps = [pickle.loads(getattr(c10d, name)()) for name in names if hasattr(c10d, name)]
    return [entry for dump in dumps for entry in dump.get("entries", [])]


def _call(entry: dict[str, Any]) -> dict[str, Any]:
    frames = ((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", []))
    inputs = zip(entry.get("input_sizes", []), entry.get("input_dtypes", []), strict=False)
    return {
        "group": str(entry["process_group"][0]),
        "number": entry["collective_seq_id"],
        "op": entry["profiling_name"].split(":", 1)[-1],
        "tensors": ", ".join(f"({', '.join(map(str, shape))}) {dtype}" for shape, dtype in inputs)
        or "no tensor",
        "has_ended": entry.get("retired", False) or entry.get("state") == "completed",
        "place": _own_place(frames),
        "called_ns": entry["time_created_ns"],
    }


def _own_place(places: Iterable[Place]) -> Place | None:
    """Return the innermost place outside of libraries."""
    library = (os.path.dirname(os.__file__), "<frozen")
    own = (one for one in places if "site-packages" not in one[0] and not one[0].startswith(library))
    return next(own, None)
