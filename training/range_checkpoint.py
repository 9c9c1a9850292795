"""Write a checkpoint of named tensors by all ranks together, and read it on any number of ranks.

      a weight, saved by 3 ranks      | 0  1  2 | 3  4  5  6 | 7  8  9 |
                loaded by 2           | 0  1  2   3  4 | 5  6   7  8  9 |     each reads parts of two files

torch.distributed.checkpoint (DCP) writes what each rank has under its name and range, and finds, for the
ranges of a new layout, the files that hold them. A plain tensor is equal on all ranks, and is written once.

      runs/first/                         on a file system that all machines share
          checkpoint-4/                   the one with the greatest number counts
              __0_0.distcp  __1_0.distcp  what a rank has written
              .metadata                   DCP's: which range of which tensor is in which file
              checkpoint.pt               the header (lab.checkpoint): plain numbers, strings, lists, dicts,
                                          and the SHA-256 of each file beside it
          checkpoint-5.partial-8c1f03ab/  being written; becomes checkpoint-5 when all ranks are done

A rename happens at once or not at all, and the older checkpoint is removed after it: whenever the job is
killed, there is a complete one. If a bit of a file has changed, loading raises an error that names the file.
Loading runs no code from the files.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from comm.exchange import naming_a_lost_rank, on_all, on_main
from lab import checkpoint
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError, reason
from lab.ranges import Items, LoadPlanner, Reader, SavePlanner, Writer, unpickle

OURS = re.compile(r"checkpoint-(\d+)(\.partial-[0-9a-f]+)?")
METADATA = ".metadata"  # DCP's name for it
FILES = "sha256 of files"  # the header's key for the digests of the files


@dataclass(frozen=True)
class Found:
    """A complete checkpoint: where it is, its header, and for each name what is known of the tensor."""

    folder: Path
    header: dict[str, Any]
    metadata: Metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return self.metadata.state_dict_metadata  # type: ignore[return-value]


def save(cluster: Cluster, directory: Path, items: Items, header: dict[str, Any]) -> None:
    """Write the ranges of all ranks and rank 0's `header`; all ranks call it. Returns when all is on disk.

    Raise WorkbookError on all ranks if one has failed or died, or another job saves here; an older checkpoint
    is then unchanged.
    """
    what = f"save the checkpoint {directory}"
    name, partial = on_main(cluster, what, lambda: _begin(directory))
    folder = directory / partial
    try:
        on_all(what, lambda: _must_see(folder, cluster.rank))
        with _in_a_sentence(what):
            dcp.save(items, storage_writer=Writer(folder), planner=SavePlanner(False, False))
        of_ranks = on_all(what, lambda: _digests(folder.glob(f"__{cluster.rank}_*")))
        on_main(cluster, what, lambda: _end(directory, partial, name, header, of_ranks))
    finally:
        if cluster.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def find(cluster: Cluster, directory: Path, refuse_unless_fitting: Callable[[Found], None]) -> Found:
    """Return the checkpoint in `directory`, once it is known to be undamaged and to fit; all ranks call it.

    Raise WorkbookError on all ranks if one finds an error, or `refuse_unless_fitting` raises it on one.
    """
    what = f"load the checkpoint {directory}"
    newest = on_main(cluster, what, lambda: _newest(directory))
    seen: list[Found] = []

    def look() -> str:
        folder = directory / newest
        _must_see(folder, cluster.rank)
        header = checkpoint.unpack((folder / checkpoint.NAME).read_bytes(), str(folder / checkpoint.NAME))
        with checkpoint.refusing_misfits(folder / checkpoint.NAME):
            digests = header[FILES]
            _refuse_damaged(folder, {METADATA: digests[METADATA]})
            names = sorted(digests.keys() - {METADATA})
            mine = names[cluster.rank :: cluster.world_size]  # together the ranks read each file once
            _refuse_damaged(folder, {name: digests[name] for name in mine})
            found = Found(folder, header, unpickle((folder / METADATA).read_bytes(), folder / METADATA))
            _refuse_others(found)
            refuse_unless_fitting(found)
        seen.append(found)
        return digests[METADATA]  # it differs for each save, because the metadata contains the save's id

    if len(set(on_all(what, look))) > 1:
        raise WorkbookError(f"the ranks see different checkpoints in {directory}: all machines must share it")
    return seen[0]


def read(found: Found, items: Items) -> None:
    """Fill the ranges and tensors of `items`, of any layout; all ranks call it, with the same names."""
    with _in_a_sentence(f"load the checkpoint {found.folder}"):
        reader = Reader(found.folder, found.metadata)
        dcp.load(items, storage_reader=reader, planner=LoadPlanner(False, False))


# What is where.


def _newest(directory: Path) -> str:
    newest = max(_numbers(directory), default=0)
    if newest == 0:
        raise checkpoint.nothing_in(directory)
    return f"checkpoint-{newest}"


def _numbers(directory: Path) -> list[int]:
    try:
        matches = [OURS.fullmatch(name) for name in os.listdir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(match[1]) for match in matches if match and not match[2]]


def _begin(directory: Path) -> tuple[str, str]:
    """Return the next checkpoint's name, and the name that it has until it is complete.

    The latter is random: a rank that sees another disk does not find it there.
    """
    checkpoint.claim(directory)
    newest = max(_numbers(directory), default=0)
    _remove_all_but(f"checkpoint-{newest}", directory)  # what a killed job has left
    name = f"checkpoint-{newest + 1}"
    partial = f"{name}.partial-{secrets.token_hex(4)}"
    (directory / partial).mkdir()
    return name, partial


def _end(
    directory: Path, partial: str, name: str, header: dict[str, Any], of_ranks: list[dict[str, str]]
) -> None:
    digests = _digests([directory / partial / METADATA])
    for of_rank in of_ranks:
        digests |= of_rank
    checkpoint.write(directory / partial, header | {FILES: digests})
    os.rename(directory / partial, directory / name)
    _remove_all_but(name, directory)


def _remove_all_but(name: str, directory: Path) -> None:
    for other in os.listdir(directory):
        if OURS.fullmatch(other) and other != name:
            shutil.rmtree(directory / other, ignore_errors=True)


def _must_see(folder: Path, rank: int) -> None:
    if not folder.is_dir():
        raise WorkbookError(
            f"rank 0 sees {folder} and rank {rank} does not: all machines must share the folder"
        )


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _refuse_damaged(folder: Path, digests: dict[str, str]) -> None:
    for name, expected in digests.items():
        if _digests([folder / name]) != {name: expected}:
            raise WorkbookError(f"{folder / name} is damaged: resume from another checkpoint")


def _refuse_others(found: Found) -> None:
    """Refuse metadata that leads to files which the header does not know, and which may lie anywhere."""
    for place in found.metadata.storage_data.values():
        if place.relative_path not in found.header[FILES]:
            raise WorkbookError(
                f"{found.folder / METADATA} names {place.relative_path}, which is no file of this checkpoint"
            )


@contextmanager
def _in_a_sentence(what: str) -> Iterator[None]:
    """Raise one sentence as a WorkbookError where DCP raises the tracebacks of all ranks on every rank."""
    try:
        with naming_a_lost_rank(what):
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise WorkbookError(f"cannot {what}: on rank {rank}, {reason(cause)}") from error
