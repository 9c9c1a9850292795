"""Save a training state in the background, and load it on the same or another mesh.

      training      step 120  ──copy── step 121 ─── step 122 ─── step 123 ─── ...
                               │ to host memory
      rank 0's thread          └── writes rank-0 ── waits for all reports ── manifest: complete
      rank 1's thread          └── writes rank-1 ── reports "written" ──┘

      runs/first/               on a file system that all machines share
          step-100/             the last `keep` complete checkpoints stay
          step-120/
              rank-0-5f0c.safetensors, rank-1-5f0c.safetensors, ...     the elements that each rank saves
              manifest                                                  which elements are in which file

The training waits only while its tensors are copied to host memory, and for an earlier save that is not yet
written. Rank 0 writes the manifest after the files of all ranks are on disk, and the checkpoint is complete
as soon as rank 0 has renamed the manifest to its final name. Only then is an older checkpoint removed. So the
last complete checkpoint stays, whenever ranks are killed. The threads communicate through the job's store,
because their collectives would be mixed with those of the training. If a write fails, training continues, and
the older checkpoint stays the last one.

    checkpoints = BackgroundCheckpoints("runs/first", cluster, keep=3)
    checkpoints.save(step, pieces, {"step": step, "random": random_state()})
    checkpoints.wait()                                       # at the end; raises if a save has failed

A piece (checkpoint_pieces.py) says which elements of which full tensor it has. So a run on any mesh finds the
elements that it needs. To save M bytes costs M bytes of host memory, and 2 M bytes of memory traffic, because
the copy reads and writes each byte. The idea is that of CheckFreq (Mohan et al. 2021) and of the asynchronous
checkpoints of torch.distributed.checkpoint.
"""

import base64
import json
import secrets
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comm.exchange import on_all, on_main
from hybrid_parallel import checkpoint_folder as files
from hybrid_parallel.checkpoint_pieces import Part, Piece
from hybrid_parallel.checkpoint_reading import fill, refuse_other_tensors
from lab import checkpoint
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError, reason
from training.validate import validate_shared_folder

_POLL = 0.01  # seconds between two looks at the store


class BackgroundCheckpoints:
    """Save and load the checkpoints of a job in `folder`. All ranks make all calls, in the same order.

    The last `keep` complete checkpoints stay. Raise WorkbookError on all ranks if one cannot write in the
    folder, another job saves there, or it holds checkpoints of another format.
    """

    def __init__(self, folder: str | Path, cluster: Cluster, keep: int = 3) -> None:
        if keep < 1:
            raise WorkbookError(f"keep is {keep}; at least 1 checkpoint must stay.")
        self._folder, self._cluster, self._keep = Path(folder), cluster, keep
        validate_shared_folder(cluster, "--checkpoint", str(folder))
        self._token = on_main(cluster, f"save in {folder}", self._prepare)
        self._not_loaded = self.latest()
        self._writer: threading.Thread | None = None
        self._buffers: dict[Part, Tensor] = {}
        self._failure = ""
        self._abandoned = threading.Event()
        self._last_saved, self._saves = -1, 0

    def _prepare(self) -> str:
        files.refuse_other_formats(self._folder)
        checkpoint.claim(self._folder)
        files.remove_leftovers(self._folder)
        return secrets.token_hex(4)  # identifies this job in the names of its files and of its keys

    def save(
        self,
        step: int,
        pieces: Iterable[Piece],
        extra: Mapping[str, Any],
        tied: Mapping[str, str] | None = None,
    ) -> None:
        """Copy the pieces to host memory, and return; a thread writes them. First wait for an earlier save.

        `extra` is what this rank needs besides its pieces to resume: numbers and strings, in lists and dicts.
        `tied` maps the second name of a tied tensor to the first one, under which it is saved. Raise
        WorkbookError if the folder has checkpoints of an earlier run, and this run has loaded none of them.
        """
        if self._not_loaded is not None:
            raise WorkbookError(
                f"{self._folder} has the checkpoint of step {self._not_loaded}, from which this run has not "
                "started: resume from it, or name another folder"
            )
        # A copy, because the run may change the values. Other types than those above raise a TypeError here.
        values = json.loads(json.dumps({"extra": extra, "tied": tied or {}}))
        self._finish_writing()
        if step == self._last_saved:
            return
        tensors = self._snapshot(pieces)
        self._saves += 1
        self._writer = threading.Thread(target=self._write, args=(step, tensors, values), daemon=True)
        self._writer.start()

    def _snapshot(self, pieces: Iterable[Piece]) -> dict[Part, Tensor]:
        """Return copies on the host. Their memory is used again at the next save."""
        tensors: dict[Part, Tensor] = {}
        for piece in pieces:
            if piece.is_replica:
                continue
            part, source = piece.part, piece.tensor.detach()
            if part in tensors:
                raise ValueError(f"this rank has {part} in two pieces")
            copy = self._buffers.get(part)
            if copy is None or copy.dtype != source.dtype:
                copy = torch.empty(part.numel, dtype=source.dtype, pin_memory=source.is_cuda)
            copy.view(source.shape).copy_(source)
            tensors[part] = copy
        self._buffers = tensors
        return tensors

    def _write(self, step: int, tensors: dict[Part, Tensor], values: dict[str, Any]) -> None:
        """Write this rank's file, and complete the checkpoint with the other ranks; the thread's work."""
        parts, failure = [], ""
        try:
            files.write_rank(self._folder, step, self._cluster.rank, self._token, tensors)
            parts = files.describe(self._cluster.rank, tensors)
        except Exception as error:
            failure = f"rank {self._cluster.rank}: {reason(error)}"
        word = values | {"parts": [files.as_json(part) for part in parts], "failure": failure}
        self._complete(step, json.dumps(word))

    def _complete(self, step: int, word: str) -> None:
        """Tell rank 0 whether this rank's file is on disk, and learn whether the checkpoint is complete."""
        rank, store, key = self._cluster.rank, self._cluster.store, f"{self._token}/{self._saves}"
        try:
            if self._cluster.is_main:
                others = [self._answer(f"{key}/{other}") for other in range(1, self._cluster.world_size)]
                outcome = self._publish(step, [json.loads(each) for each in (word, *others)])
                store.set(f"{key}/outcome", outcome)
                if outcome:
                    print(f"{self._sentence(step, outcome)}; training goes on", file=sys.stderr, flush=True)
            else:
                store.set(f"{key}/{rank}", word)
                outcome = self._answer(f"{key}/outcome", is_last=False)
        except Exception as error:  # another rank has died, and the store perhaps with it
            outcome = reason(error)
        if outcome:
            self._failure = self._failure or self._sentence(step, outcome)
        else:
            self._last_saved = step

    def _sentence(self, step: int, outcome: str) -> str:
        return f"cannot save the checkpoint of step {step} in {self._folder}: {outcome}"

    def _publish(self, step: int, words: list[dict[str, Any]]) -> str:
        """Complete the checkpoint if all ranks have written their files. Return "", or why it has failed."""
        failures = [word["failure"] for word in words if word["failure"]]
        try:
            if not failures:
                files.publish(self._folder, files.manifest_of(step, self._token, words))
                files.keep_newest(self._folder, step, self._keep)
        except Exception as error:
            failures.append(reason(error))
        if failures:
            with suppress(OSError):
                files.remove_leftovers(self._folder)
        return failures[0] if failures else ""

    def wait(self) -> None:
        """Wait for the last save. Raise WorkbookError if a save has failed since `wait` was last called."""
        self._finish_writing()
        failure, self._failure = self._failure, ""
        if failure:
            raise WorkbookError(failure)

    def _finish_writing(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def abandon(self) -> None:
        """End the save that is under way, without waiting for the other ranks: one of them has died."""
        self._abandoned.set()
        self._finish_writing()

    def _answer(self, key: str, is_last: bool = True) -> str:
        """Return the value of a key once another rank has set it; `is_last`: no other rank will read it.

        This checks the key again and again, so the training can use the store between two checks. The store's
        `wait` would block it.
        """
        store = self._cluster.store
        while not store.check([key]):
            if self._abandoned.wait(_POLL):
                raise WorkbookError("another rank has died")
        value = store.get(key).decode()
        if is_last:
            store.delete_key(key)
        return value

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None; the same on all ranks."""
        return on_main(
            self._cluster,
            f"look for checkpoints in {self._folder}",
            lambda: max(files.complete_steps(self._folder), default=None),
        )

    def names(self, step: int) -> set[str]:
        """Return the names of the tensors in a checkpoint; the same on all ranks."""
        what = f"load the checkpoint of step {step} in {self._folder}"
        return set(
            on_main(self._cluster, what, lambda: list(files.read_manifest(self._folder, step).by_name()))
        )

    def load(self, step: int, wanted: Iterable[Piece]) -> list[dict[str, Any]]:
        """Fill the wanted pieces, and return what each rank gave to `save` as `extra`, in rank order.

        The list is as long as the number of ranks that saved. Later checkpoints than this one are removed
        when the next one is complete. Raise WorkbookError on all ranks if a checksum is wrong on one of them,
        or if the pieces of all ranks together are not the tensors that were saved.
        """
        what, wanted = f"load the checkpoint of step {step} in {self._folder}", list(wanted)
        folder, manifests = files.folder_of(self._folder, step), []

        def look() -> list[str]:
            manifests.append(files.read_manifest(self._folder, step))
            return refuse_other_tensors(manifests[0], wanted, folder)

        names = {name for of_rank in on_all(what, look) for name in of_rank}
        [manifest] = manifests
        if left := sorted(manifest.by_name().keys() - names):
            raise WorkbookError(f"{folder} is of another model: it has {left[0]}, and this run does not")
        on_all(what, lambda: fill(folder, manifest, wanted))
        self._not_loaded = None
        return manifest.extras


def random_state() -> str:
    """Return the state of torch's random numbers on the CPU and this rank's GPU, as text for `extra`."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return " ".join(base64.b64encode(state.numpy().tobytes()).decode() for state in states)


def set_random_state(text: str) -> None:
    """Restore the state of the random numbers that `random_state` has returned."""
    states = [torch.frombuffer(bytearray(base64.b64decode(one)), dtype=torch.uint8) for one in text.split()]
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])
