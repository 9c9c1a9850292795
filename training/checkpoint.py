"""Save a training in the background, complete or not at all, and load it on any other division of the model.

      training      step 120  ──copy── step 121 ─── step 122 ─── step 123 ─── ...
                               │ to host memory
      a rank's thread          └── writes its file ── waits for all ranks ── rank 0 writes the manifest

    checkpoints = Checkpoints("runs/first", cluster, keep=3)            # all ranks call these, in one order
    checkpoints.save(step, model.state_shards(optimizer), {"seed": 0})  # returns after the copy
    checkpoints.wait()                                                  # at the end; raises if a save failed
    checkpoints.load(step, model.state_shards(optimizer))               # fills the model and the optimizer

Shards (state_shards.py) say which elements of the full tensors a rank holds. Of the ranks that hold the same,
one saves it. To load, a rank puts each full tensor together from saved shards, and takes its own elements.

      runs/first/                               on a file system that all machines share
          step-100/
          step-120/
              save-7-rank-0.safetensors         what rank 0 has saved, by names that say where it lies in the
              save-7-rank-1.safetensors         full tensors, and a CRC-32 of each shard
              manifest                          who has saved what; numbers, `extra`, and a SHA-256 of this

The manifest comes last, and makes the checkpoint complete. The saves in a folder are numbered: the newest
checkpoint is that of the last save, even if training went back to an earlier step before it. No file is a
pickle, which may run any code when it is loaded.

To save M bytes costs M bytes of host memory on all ranks together, and 2 M bytes of memory traffic. CheckFreq
(Mohan et al. 2021) has the copy and the thread; ByteCheckpoint (https://arxiv.org/abs/2407.20143) loads what
any other division has saved, as torch.distributed.checkpoint does.
"""

import functools
import gc
import hashlib
import json
import math
import os
import re
import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from comm.collectives import Group
from comm.exchange import exchange, naming_a_lost_rank, on_all, on_main
from comm.wire.groups import timeout_of
from lab.cluster import Cluster
from lab.launch.ending import complete_at_end
from lab.launch.errors import WorkbookError, reason
from lab.launch.gloo_threads import keep_from_preempting
from training.finite import not_finite
from training.loads import before_loading
from training.state_shards import Place, StateShard, tensors_and_numbers, tensors_to_load, write
from training.validate import validate_shared_folder

FORMAT = "distributed training workbook, version 5"
MANIFEST = "manifest"
STEP = re.compile(r"step-(0|[1-9]\d*)")


class Checkpoints:
    """Saves and loads the checkpoints of a job in `folder`. All ranks make all calls, in the same order.

    The last `keep` complete checkpoints stay. Raise WorkbookError on all ranks if one cannot write in the
    folder, or another job saves there.
    """

    def __init__(self, folder: str | Path, cluster: Cluster, keep: int = 3) -> None:
        self._folder, self._cluster, self._keep = Path(folder), cluster, keep
        validate_shared_folder(cluster, "--checkpoint", str(folder))
        on_main(cluster, f"save in {folder}", lambda: claim(self._folder))
        # Collectives of the thread that writes must not be mixed with those of the training.
        self._group: Group = dist.new_group(backend="gloo", timeout=timeout_of(None))
        keep_from_preempting()
        self._writer: threading.Thread | None = None
        self._failure = ""
        self._copies: dict[str, Tensor] = {}

    def save(self, step: int, shards: Iterable[StateShard], extra: Any = None) -> None:
        """Copy the shards to host memory, and return; a thread writes them. First wait for an earlier save.

        `extra` is what rank 0 wants to have in the manifest: numbers and strings, in lists and dicts. Raise
        WorkbookError if the earlier save has failed, or if the shards are not all of the full tensors once.
        """
        extra = json.loads(json.dumps(extra))  # a copy: the run may change it
        held: dict[str, Tensor] = {}

        def describe() -> tuple[int, dict[str, int], str]:
            self.join()
            tensors, numbers = tensors_and_numbers(shards)
            held.update((json.dumps(shard.place), shard.elements()) for shard in tensors if shard.numel)
            return next_number(self._folder), fingerprints(held), json.dumps(numbers)

        everyones = on_all("save a checkpoint", describe)
        savers = shared_out([prints for _, prints, _ in everyones])
        numbers = {name: one for _, _, of_rank in everyones for name, one in json.loads(of_rank).items()}
        manifest = {"number": everyones[0][0], "format": FORMAT, "extra": extra}
        manifest |= {"numbers": numbers, "savers": savers}
        mine = self._copied({name: held[name] for name in held if savers[name] == self._cluster.rank})
        arguments = self._folder / f"step-{step}", manifest, mine
        self._writer = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._writer.start()
        complete_at_end(self._writer)

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies in host memory. The next save uses this memory again."""
        before, self._copies = self._copies, {}
        for name, source in tensors.items():
            if (copy := before.get(name)) is None:
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._copies[name] = copy.copy_(source)
        return self._copies

    def _write(self, folder: Path, manifest: dict[str, Any], mine: dict[str, Tensor]) -> None:
        """Write this rank's file, and complete the checkpoint with the other ranks; the thread's work."""
        what, rank = f"save the checkpoint {folder}", self._cluster.rank
        is_written = torch.ones(1)
        try:
            refuse_diverged(mine)
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(folder / file_of(manifest["number"], rank), mine)
        except BaseException as error:
            is_written.zero_()
            self._failure = f"cannot {what}: on rank {rank}, {reason(error)}"
        try:
            with naming_a_lost_rank(what):
                dist.all_reduce(is_written, dist.ReduceOp.MIN, self._group)
            if is_written and self._cluster.is_main:
                write_manifest(folder, manifest)
                keep_newest(folder, self._keep)
        except BaseException as error:
            self._failure = self._failure or f"cannot {what}: {reason(error)}"
            with suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(self._group)  # no other rank must wait for this one
            self._group = None
            gc.collect()  # the error's frames refer to the group, too

    def join(self) -> None:
        """Wait until this rank has done its part of the last save. Raise WorkbookError if it has failed."""
        if self._writer is not None:
            self._writer.join()
        if self._failure:
            raise WorkbookError(self._failure)

    def wait(self) -> None:
        """Wait until the last save is on disk. Raise WorkbookError on all ranks if one has failed."""
        on_all("save a checkpoint", self.join)

    def find(self, step: int) -> "Found":
        """Return what the manifest of a step says. Raise WorkbookError on all ranks if one cannot read it."""
        found: list[Found] = []
        what = f"load the checkpoint of step {step} in {self._folder}"
        on_all(what, lambda: found.append(read_manifest(self._folder, step)))
        return found[0]

    def load(self, step: int, shards: Iterable[StateShard]) -> None:
        """Fill the tensors of the shards, of any division of the model, and the state of their optimizer.

        Raise WorkbookError on all ranks if a byte has changed, or if the tensors of all ranks together are
        not those that were saved.
        """
        self.wait()
        found = self.find(step)
        wanted = list(tensors_to_load(shards, found.tensors, found.numbers))
        names = {name for of_rank in exchange([shard.name for shard in wanted]) for name in of_rank}
        if left := sorted(found.tensors.keys() - names):
            raise WorkbookError(
                f"{found.folder} is of another model: it has {left[0]}, and this run does not"
            )
        before_loading(shard.tensor for shard in wanted)
        on_all(f"load {found.folder}", lambda: fill_shards(found, wanted))


def fingerprints(held: dict[str, Tensor]) -> dict[str, int]:
    """Return a sum of the bits of each tensor, by which ranks notice that they hold different values."""
    sums = {name: bits(tensor).sum(dtype=torch.int64) for name, tensor in held.items()}
    gpu = next((one.device for one in sums.values() if one.is_cuda), None)
    together = torch.stack([one.to(gpu) for one in sums.values()]).tolist() if sums else []  # one host wait
    return dict(zip(sums, together, strict=True))


def shared_out(prints_of_ranks: list[dict[str, int]]) -> dict[str, int]:
    """Return the rank that saves each shard: of those that have it, the one with least to save so far.

    Raise WorkbookError unless the shards of each tensor have all of its elements once, and ranks that hold
    the same shard have the same values. Only of buffers, rank 0's are taken (docs/design.md).
    """
    holders: dict[str, list[int]] = {}
    for rank, prints in enumerate(prints_of_ranks):
        for name in prints:
            holders.setdefault(name, []).append(rank)
    elements, savers = [0] * len(prints_of_ranks), {}
    places: dict[str, list[Place]] = {}
    for name, ranks in holders.items():
        place = Place(*json.loads(name))
        places.setdefault(place.name, []).append(place)
        if place.name.startswith("buffer/"):  # those of one rank belong together
            savers[name] = ranks[0]
        elif len({prints_of_ranks[rank][name] for rank in ranks}) == 1:
            savers[name] = min(ranks, key=elements.__getitem__)
        else:
            raise WorkbookError(
                f"ranks have different values of {place.name}, and a checkpoint has one: save when all "
                "replicas are equal"
            )
        elements[savers[name]] += place.end - place.start
    for name, parts in places.items():
        numel = sum(place.end - place.start for place in parts)
        if numel != math.prod(parts[0].shape) or any(a.overlaps(b) for a, b in combinations(parts, 2)):
            raise WorkbookError(f"the shards of {name} leave out some of its elements, or have some twice")
    return savers


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.view(sizes[real.itemsize])


def refuse_diverged(tensors: dict[str, Tensor]) -> None:
    """Raise WorkbookError if a number is inf or NaN: a diverged model must not replace a good one."""
    named = ((json.loads(name)[0], tensor) for name, tensor in tensors.items())
    computed = ((name, tensor) for name, tensor in named if not name.startswith("buffer/"))  # no masks
    if (name := not_finite(computed)) is not None:
        raise WorkbookError(f"{name} has numbers that are not finite: the training has diverged")


# The files of a checkpoint.


class Found(NamedTuple):
    """A complete checkpoint, as its manifest describes it."""

    folder: Path
    tensors: dict[str, list[Place]]  # where the shards of each tensor lie in it
    files: dict[str, Path]  # in which file a shard is; its name there is its place as JSON
    numbers: dict[str, Any]  # of the optimizer
    extra: Any


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write flat tensors and their checksums."""
    real = {name: tensor.view(tensor.dtype.to_real()) for name, tensor in tensors.items()}  # not all complex
    save_file(real, path, {name: checksum(tensor) for name, tensor in real.items()})
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def checksum(flat: Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes."""
    return str(zlib.crc32(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Complete a checkpoint, when the files of all ranks are on disk."""
    text, path = json.dumps(manifest), folder / f"save-{manifest['number']}-{MANIFEST}"
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(path, folder / MANIFEST)


def read_manifest(directory: Path, step: int) -> Found:
    """Return a complete checkpoint. Raise WorkbookError if it is missing or its manifest is damaged."""
    folder = directory / f"step-{step}"
    path = folder / MANIFEST
    if not path.exists():
        raise WorkbookError(f"there is no complete checkpoint of step {step} in {directory}")
    text, _, digest = path.read_bytes().strip().rpartition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise _damaged(path)
    manifest = json.loads(text)
    if (its := manifest["format"]) != FORMAT:
        raise WorkbookError(f"{path} has the format {its!r}, and this program reads {FORMAT!r}")
    found = Found(folder, {}, {}, manifest["numbers"], manifest["extra"])
    for name, rank in manifest["savers"].items():
        place = Place(*json.loads(name))
        found.tensors.setdefault(place.name, []).append(place)
        found.files[name] = folder / file_of(manifest["number"], rank)
    return found


def file_of(number: int, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"save-{number}-rank-{rank}.safetensors"


def _damaged(path: Path) -> WorkbookError:
    return WorkbookError(f"{path} is damaged; remove {path.parent} to resume from an earlier checkpoint")


def fill_shards(found: Found, wanted: Iterable[StateShard]) -> None:
    """Fill the tensors of the shards from a checkpoint, in this process alone.

    Raise WorkbookError if a tensor is missing or has another shape, or if a file is not as it was saved.
    """
    opened = functools.cache(lambda path: safe_open(path, "pt"))
    for shard in (shard for shard in wanted if shard.numel):
        mine, places = shard.place, found.tensors.get(shard.name, [])
        if not places or list(places[0].shape) != list(mine.shape):
            its = f"the shape {places[0].shape}" if places else "nothing"
            raise WorkbookError(
                f"{found.folder} is of another model: it has {its} for {shard.name}, and this run has the "
                f"shape {list(mine.shape)}"
            )
        full = torch.empty(mine.shape, dtype=getattr(torch, places[0].dtype))
        for place in (place for place in places if place.overlaps(mine)):
            name = json.dumps(place)
            try:
                file = opened(path := found.files[name])
                # A copy, because safetensors does not align complex numbers as torch expects it.
                elements = file.get_tensor(name).clone()
                is_sound = checksum(elements) == file.metadata()[name]
            except (SafetensorError, FileNotFoundError, LookupError, TypeError):
                is_sound = False
            if not is_sound:
                raise _damaged(path)
            write(place.box_in(full), place.start, elements.view(full.dtype))
        shard.take_from(full)


# The checkpoints in a folder.


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints, in the order in which they were completed."""
    matches = [STEP.fullmatch(path.parent.name) for path in directory.glob(f"step-*/{MANIFEST}")]
    steps = [int(match[1]) for match in matches if match]
    return sorted(steps, key=lambda step: (number_of(directory / f"step-{step}"), step))


def number_of(folder: Path) -> float:
    """Return the number of the save that a manifest completed: 0 if none did, inf if one cannot read it."""
    try:
        match = re.match(rb'\{"number": (\d+),', (folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return 0
    return int(match[1]) if match else math.inf


def next_number(directory: Path) -> int:
    """Return the number of the next save."""
    return 1 + int(max(filter(math.isfinite, map(number_of, directory.glob("step-*"))), default=0))


def keep_newest(saved: Path, number: int) -> None:
    """Remove all complete checkpoints but the last `number`; `saved` is one of them."""
    old = {saved.with_name(f"step-{step}") for step in complete_steps(saved.parent)[:-number]} - {saved}
    for folder in old:
        (folder / MANIFEST).unlink()  # from now on it is no checkpoint
    for folder in (saved, *old):
        remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what belongs to no complete checkpoint, such as files of a killed job or of a failed save."""
    number = number_of(folder)
    written = [*folder.glob("save-*"), *folder.glob(".tmp*")]  # safetensors writes .tmp and renames it
    for path in written:
        if number < math.inf and not path.name.startswith(f"save-{number}-"):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()  # if nothing is left


_claims: dict[Path, int] = {}  # an open descriptor of each claimed folder


def claim(folder: Path) -> None:
    """Let no other process save in `folder` until this process ends, where the file system has locks."""
    path = folder.resolve()
    try:
        import fcntl

        if path not in _claims:
            _claims[path] = os.open(folder, os.O_RDONLY)
            fcntl.flock(_claims[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(_claims.pop(path))
        raise WorkbookError(
            f"another job saves its checkpoints in {folder}: choose another folder, or wait until it ends"
        ) from None
    except (ImportError, OSError):
        pass  # Windows, or a file system without locks, such as NFS
    for leftover in folder.glob("step-*"):
        remove_leftovers(leftover)
