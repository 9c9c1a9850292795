"""Read and write the files of a checkpoint: one of each rank, and the manifest that makes it complete.

      runs/first/step-120/
          rank-0-5f0c.safetensors     the parts that rank 0 has saved: flat tensors, each named str(part)
          rank-1-5f0c.safetensors
          manifest                    JSON: the names of these files; for each part the rank, the elements and
                                      a checksum of every mebibyte; each rank's `extra`. Last line: SHA-256

A folder without a manifest is not a complete checkpoint, and a file that its manifest does not name is left
over from a save that failed. The ranks' files have the safetensors format, a JSON header and the tensors'
bytes: a file can be read in part, and loading it runs no code (torch.save's format is a program for an
unpickler). https://huggingface.co/docs/safetensors
"""

import functools
import hashlib
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybrid_parallel.checkpoint_pieces import Line, Part
from lab import checkpoint
from lab.launch.errors import WorkbookError

FORMAT = "distributed training workbook, checkpoint of hybrid_parallel, version 1"
MANIFEST = "manifest"
BLOCK = 1 << 20  # bytes that one checksum covers: the least that is read and checked
STEP = re.compile(r"step-(\d+)")
WAY_OUT = "remove {} to resume from an earlier checkpoint"
_FILE = re.compile(r"rank-(\d+)-[0-9a-f]+\.safetensors")


@dataclass(frozen=True)
class SavedPart:
    """Describe a part in a rank's file: which elements, their dtype, and the CRC-32 of each block."""

    part: Part
    dtype: str
    rank: int
    checksums: list[int]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype. Raise ValueError if there is no such dtype."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.part} has the dtype {self.dtype}")
        return dtype

    def refuse_nonsense(self, manifest: "Manifest") -> None:
        """Raise ValueError if the part cannot be one of this checkpoint."""
        if manifest.block < 1 or manifest.block % self.torch_dtype.itemsize:
            raise ValueError(f"a checksum covers {manifest.block} bytes")
        blocks = -(-self.part.numel * self.torch_dtype.itemsize // manifest.block)
        if self.rank not in range(len(manifest.files)) or len(self.checksums) != blocks:
            raise ValueError(f"{self.part} has {len(self.checksums)} checksums, and is rank {self.rank}'s")


@dataclass(frozen=True)
class Manifest:
    """Describe a complete checkpoint. `tied` maps names of tensors to the names under which they are saved.

    `extras` has what each rank has saved besides its tensors, in rank order.
    """

    step: int
    files: list[str]
    parts: list[SavedPart]
    extras: list[dict[str, Any]]
    tied: dict[str, str]
    block: int
    format: str = FORMAT

    def by_name(self) -> dict[str, list[SavedPart]]:
        """Return the parts of each full tensor."""
        found: dict[str, list[SavedPart]] = {}
        for saved in self.parts:
            found.setdefault(saved.part.name, []).append(saved)
        return found

    def lines(self) -> dict[str, Line]:
        """Return for each full tensor where its elements are.

        Raise WorkbookError if elements are missing or saved twice, or parts have different shapes or dtypes.
        """
        lines = {}
        for name, saved in self.by_name().items():
            if len({(one.part.shape, one.dtype) for one in saved}) > 1:
                raise WorkbookError(f"the ranks have saved {name} with different shapes or dtypes")
            lines[name] = Line(name, saved[0].part.shape, [one.part for one in saved])
        return lines

    def saved_name(self, name: str) -> str:
        """Return the name under which a tensor is saved. A tied one is saved under one of its names."""
        return name if name in self._names else self.tied.get(name, name)

    @functools.cached_property
    def _names(self) -> set[str]:
        return {saved.part.name for saved in self.parts}


def folder_of(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return directory / f"step-{step}"


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints, in ascending order."""
    return sorted(step for step, folder in _folders(directory) if (folder / MANIFEST).exists())


def _folders(directory: Path) -> Iterator[tuple[int, Path]]:
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(directory):
            if match := STEP.fullmatch(name):
                yield int(match[1]), directory / name


def refuse_other_formats(directory: Path) -> None:
    """Refuse a directory with checkpoints of the single-technique scripts, which this lesson cannot read."""
    names = set(os.listdir(directory)) if directory.is_dir() else set()
    if checkpoint.NAME in names:
        what = f"{checkpoint.NAME}, a checkpoint in one file, as other lessons save it"
    elif old := sorted(name for name in names if re.fullmatch(r"checkpoint-\d+", name)):
        what = f"{old[-1]}, a checkpoint of torch.distributed.checkpoint, as the lessons on ZeRO save it"
    else:
        return
    raise WorkbookError(f"{directory} holds {what}; hybrid_parallel cannot read it: name another folder")


def _file_of(rank: int, token: str) -> str:
    return f"rank-{rank}-{token}.safetensors"


# Writing.


def write_rank(directory: Path, step: int, rank: int, token: str, tensors: dict[Part, Tensor]) -> None:
    """Write one rank's flat CPU tensors. Return when they are on disk."""
    folder = folder_of(directory, step)
    folder.mkdir(exist_ok=True)
    path = folder / _file_of(rank, token)
    with as_os_error():
        save_file({str(part): tensor for part, tensor in tensors.items()}, path)
    sync(path)
    sync(folder)


def describe(rank: int, tensors: dict[Part, Tensor]) -> list[SavedPart]:
    """Return what the manifest says of a rank's tensors."""
    return [
        SavedPart(part, str(tensor.dtype).removeprefix("torch."), rank, _checksums(tensor))
        for part, tensor in tensors.items()
    ]


def manifest_of(step: int, token: str, words: list[dict[str, Any]]) -> Manifest:
    """Return the manifest of the parts in `words`, which are the reports of all ranks, in rank order.

    A part that several ranks have saved counts once. Raise WorkbookError if its values are not equal.
    """
    found: dict[Part, SavedPart] = {}
    for word in words:
        for saved in map(_part, word["parts"]):
            first = found.setdefault(saved.part, saved)
            if (first.dtype, first.checksums) != (saved.dtype, saved.checksums):
                raise WorkbookError(
                    f"rank {first.rank} and rank {saved.rank} have different numbers as {saved.part}"
                )
    return Manifest(
        step=step,
        files=[_file_of(rank, token) for rank in range(len(words))],
        parts=list(found.values()),
        extras=[word["extra"] for word in words],
        tied=words[0]["tied"],
        block=BLOCK,
    )


def as_json(saved: SavedPart) -> dict[str, Any]:
    """Return a part as JSON has it, for a report to `manifest_of`."""
    return json.loads(json.dumps(asdict(saved)))


def publish(directory: Path, manifest: Manifest) -> None:
    """Complete a checkpoint whose ranks' files are all on disk: write and rename its manifest.

    Raise WorkbookError if elements of a tensor are missing or saved twice.
    """
    manifest.lines()
    folder = folder_of(directory, manifest.step)
    text = json.dumps(asdict(manifest)).encode()
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("wb") as file:
        file.write(text + checkpoint.seal(hashlib.sha256(text)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / MANIFEST)
    sync(folder)
    sync(directory)


def keep_newest(directory: Path, newest: int, number: int) -> None:
    """Keep the last `number` complete checkpoints up to step `newest`. Remove earlier and later ones.

    Later ones are from a run that went further, before this run resumed at an earlier step. Manifests go
    first: a checkpoint that is removed in part must not look complete.
    """
    steps = [step for step in complete_steps(directory) if step <= newest][-number:]
    for step in set(complete_steps(directory)) - set(steps):
        (folder_of(directory, step) / MANIFEST).unlink()
    remove_leftovers(directory)


def remove_leftovers(directory: Path) -> None:
    """Remove files that belong to no complete checkpoint, such as those of a killed job or a failed save."""
    for step, folder in _folders(directory):
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)
            continue
        with suppress(WorkbookError, OSError):  # a damaged manifest is reported when it is loaded
            known = {MANIFEST, *read_manifest(directory, step).files}
            for name in set(os.listdir(folder)) - known:
                (folder / name).unlink(missing_ok=True)


def _checksums(flat: Tensor) -> list[int]:
    """Return the CRC-32 of each block of a flat CPU tensor. It changes with any single bit."""
    data = flat.view(torch.uint8).numpy().data
    return [zlib.crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]


def sync(path: Path) -> None:
    """Return once a file, or the names in a folder, are on disk."""
    if path.is_dir() and sys.platform == "win32":
        return  # Windows cannot sync a folder
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def as_os_error() -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"I/O error: (.+?) \(os error (\d+)\)", str(error))
        raise OSError(int(found[2]), found[1]) if found else OSError(str(error)) from error


# Reading.


def read_manifest(directory: Path, step: int) -> Manifest:
    """Return the manifest of a complete checkpoint. Raise WorkbookError if it is missing or damaged."""
    path = folder_of(directory, step) / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise WorkbookError(f"there is no complete checkpoint of step {step} in {directory}") from None
    except OSError as error:
        raise WorkbookError(f"cannot read {path}: {error.strerror or error}") from error
    text = data[: -checkpoint.SEAL_BYTES]
    if data[-checkpoint.SEAL_BYTES :] != checkpoint.seal(hashlib.sha256(text)):
        raise WorkbookError(f"{path} is damaged; {WAY_OUT.format(path.parent)}")
    with checkpoint.refusing_misfits(path):
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise WorkbookError(
                f"{path} has the format {found['format']!r}, and this program reads {FORMAT!r}: name another "
                "folder"
            )
        if not all(_FILE.fullmatch(name) for name in found["files"]):
            raise ValueError("it names a file that is no rank's")
        manifest = Manifest(**found | {"parts": [_part(one) for one in found["parts"]]})
        for saved in manifest.parts:
            saved.refuse_nonsense(manifest)
        return manifest


def _part(saved: dict[str, Any]) -> SavedPart:
    part = saved["part"]
    box = tuple((first, end) for first, end in part["box"])
    return SavedPart(**saved | {"part": Part(**part | {"shape": tuple(part["shape"]), "box": box})})
