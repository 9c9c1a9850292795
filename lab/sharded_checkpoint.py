"""A checkpoint that all ranks write together, and that any number of them reads: named tensors, in ranges.

      a weight, saved by 3 ranks      | 0  1  2 | 3  4  5  6 | 7  8  9 |
                loaded by 2           | 0  1  2   3  4 | 5  6   7  8  9 |     each reads parts of two files

torch.distributed.checkpoint (DCP) writes what each rank has under its name and range, and finds, for the
ranges of a new layout, the files that hold them. A plain tensor is equal on all ranks, and is written once.

      runs/first/                         on a file system that all machines share
          checkpoint-4/                   the one with the greatest number counts
              __0_0.distcp  __1_0.distcp  what a rank has written
              .metadata                   DCP's: which range of what stands where
              checkpoint.pt               the header: plain numbers, strings, lists and dicts (lab.checkpoint)
          checkpoint-5.partial-8c1f03ab/  being written; becomes checkpoint-5 when all ranks are done

A rename happens at once or not at all, and the older checkpoint goes after it: whenever the job is killed,
there is a whole one. Loading runs no code from the files.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import hashlib
import io
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lab import checkpoint
from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.together import on_all, on_main, reason

OURS = re.compile(r"checkpoint-(\d+)(\.partial-[0-9a-f]+)?")
METADATA = ".metadata"  # DCP's name for it


@dataclass(frozen=True, eq=False)
class Range:
    """What a rank has of a flat tensor of `numel` elements: those from `start` on. DCP calls the methods."""

    tensor: Tensor
    start: int
    numel: int

    def size(self) -> torch.Size:
        return torch.Size([self.numel])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.tensor.numel() == 0 and self.numel > 0:
            return []  # it has no place of its own: the next rank's range starts there, too
        return [ChunkStorageMetadata(torch.Size([self.start]), self.tensor.shape)]

    def __create_write_items__(self, key: str, _: object) -> list[planner.WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            planner.WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]


Items = dict[str, Range | Tensor]


@dataclass(frozen=True)
class Found:
    """A whole checkpoint: where it is, its header, and for each name what is known of the tensor."""

    folder: Path
    header: dict[str, Any]
    metadata: Metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return self.metadata.state_dict_metadata  # type: ignore[return-value]


def save(cluster: Cluster, directory: Path, items: Items, header: dict[str, Any]) -> None:
    """Write the ranges of all ranks and rank 0's `header`; all ranks call it. Returns when all is on disk.

    WorkbookError on all ranks if one has failed; an older checkpoint is then as it was. Only one job may
    save to a directory.
    """
    what = f"save the checkpoint {directory}"
    name, partial = on_main(cluster, what, lambda: _begin(directory))
    try:
        on_all(what, lambda: _must_see(directory / partial))
        with _in_a_sentence(what):
            dcp.save(items, storage_writer=_Writer(directory / partial), planner=_SavePlanner(False, False))
        on_main(cluster, what, lambda: _end(directory, partial, name, header))
    finally:
        if cluster.is_main:
            shutil.rmtree(directory / partial, ignore_errors=True)


def find(cluster: Cluster, directory: Path, refuse_unless_fitting: Callable[[Found], None]) -> Found:
    """The checkpoint in `directory`, once it is known to be whole and to fit; all ranks call it.

    WorkbookError on all ranks if one finds something wrong, or `refuse_unless_fitting` raises it on one.
    """
    what = f"load the checkpoint {directory}"
    newest = on_main(cluster, what, lambda: _newest(directory))
    seen: list[Found] = []

    def look() -> str:
        folder = directory / newest
        _must_see(folder)
        data = (folder / METADATA).read_bytes()
        found = Found(folder, _header(folder / checkpoint.NAME), _unpickle(data, folder / METADATA))
        _refuse_unless_long_enough(found)
        refuse_unless_fitting(found)
        seen.append(found)
        return hashlib.sha256(data).hexdigest()  # no two saves have the same: it has the save's id in it

    if len(set(on_all(what, look))) > 1:
        raise WorkbookError(f"the ranks see different checkpoints in {directory}: all machines must share it")
    return seen[0]


def read(found: Found, items: Items) -> None:
    """Fill the ranges and tensors of `items`, of any layout; all ranks call it, with the same names."""
    with _in_a_sentence(f"load the checkpoint {found.folder}"):
        reader = _Reader(found.folder, found.metadata)
        dcp.load(items, storage_reader=reader, planner=_LoadPlanner(False, False))


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
    """The next checkpoint's name, and the one it has until then, which no disk but this one can have."""
    directory.mkdir(parents=True, exist_ok=True)
    newest = max(_numbers(directory), default=0)
    _remove_all_but(f"checkpoint-{newest}", directory)  # what a killed job has left
    name = f"checkpoint-{newest + 1}"
    partial = f"{name}.partial-{secrets.token_hex(4)}"
    (directory / partial).mkdir()
    return name, partial


def _end(directory: Path, partial: str, name: str, header: dict[str, Any]) -> None:
    checkpoint.save(directory / partial, header)
    os.rename(directory / partial, directory / name)
    _remove_all_but(name, directory)


def _remove_all_but(name: str, directory: Path) -> None:
    for other in os.listdir(directory):
        if OURS.fullmatch(other) and other != name:
            shutil.rmtree(directory / other, ignore_errors=True)


def _must_see(folder: Path) -> None:
    if not folder.is_dir():
        raise WorkbookError(
            f"rank 0 sees {folder} and another rank does not: all machines must share the folder"
        )


def _header(path: Path) -> dict[str, Any]:
    return checkpoint.unpack(path.read_bytes(), str(path))


def _refuse_unless_long_enough(found: Found) -> None:
    ends: dict[str, int] = {}
    for place in found.metadata.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in ends.items():
        path = found.folder / name
        size = path.stat().st_size if path.parent == found.folder else 0
        if size < end:
            raise WorkbookError(f"{path} is truncated, it has {size} of {end} bytes: resume from another one")


@contextmanager
def _in_a_sentence(what: str) -> Iterator[None]:
    """DCP has all ranks fail together, with everybody's tracebacks."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise WorkbookError(f"cannot {what}: on rank {rank}, {reason(cause)}") from error


# What is DCP's, made to know ranges and to trust no file.


class _SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        item = self.state_dict[index.fqn]
        return item.tensor if isinstance(item, Range) else item


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        item = self.state_dict[index.fqn]
        return item.tensor if isinstance(item, Range) else item


class _Writer(dcp.FileSystemWriter):
    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except (OSError, RuntimeError) as error:
            raise checkpoint.disk_error(error) or error from error

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # DCP's has the path, too, which does not last


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, found: Metadata) -> None:
        super().__init__(folder)
        self._found = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._found  # DCP's unpickles the file, whatever it may be


def _unpickle(data: bytes, path: Path) -> Metadata:
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        if isinstance(found, Metadata) and found.storage_data is not None:
            return found
    except Exception as error:  # bytes of any origin fail in any way
        raise WorkbookError(f"{path} is damaged: resume from another checkpoint") from error
    raise WorkbookError(f"{path} is not of a checkpoint: resume from another one")


class _Unpickler(pickle.Unpickler):
    """Admits what the metadata of tensors is made of, and no other class: those could run any code.

    So it refuses DCP's metadata of pickled objects, too, which DCP would load without such care.
    """

    PARTS: tuple[Any, ...] = (
        *(Metadata, StorageMeta, MetadataIndex, ChunkStorageMetadata, filesystem._StorageInfo),
        *(TensorStorageMetadata, TensorProperties, metadata._MEM_FORMAT_ENCODING),
        *(torch.Size, torch.serialization._get_layout),
    )
    NAMES = frozenset((part.__module__, part.__name__) for part in PARTS)

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self.NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
