"""Write and read the boxes of full tensors with torch.distributed.checkpoint (DCP), and check every byte.

      runs/first/                      on a file system that all machines share
          step-100/
          step-120.tmp-5f0c/           being written; becomes step-120 when all ranks are done
              __0_0.distcp             the boxes that rank 0 has saved, one after the other, without a gap
              __1_0.distcp
              manifest                 for each full tensor its dtype, shape and boxes; for each box the file,
                                       the place in it, and a CRC-32; what each rank gave as `extra`. The last
                                       line is the SHA-256 of the text

DCP asks each rank for boxes of full tensors, drops those that several ranks offer, validates that the boxes
cover each tensor once, and at load finds those that overlap what is wanted. Its own list of them is a pickle,
which may run any code when it is loaded. The manifest is JSON, and torch.load reads the boxes with
weights_only, so loading runs no code from the files.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from comm.collectives import Group
from comm.exchange import naming_a_lost_rank
from lab.launch.errors import WorkbookError, reason

# DCP says so where one process saves or loads alone, as export does.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

Ints = tuple[int, ...]
FORMAT = "distributed training workbook, version 2"
MANIFEST = "manifest"
STEP = re.compile(r"step-(\d+)")
_TEMPORARY = re.compile(r"step-\d+\.tmp-[0-9a-f]+")
_FILE = re.compile(r"__\d+_\d+\.distcp")


class Boxes:
    """Holds what this rank saves, or wants, of one full tensor: a view of its own tensor for each box."""

    def __init__(self, shape: Ints) -> None:
        self.views: dict[Ints, Tensor] = {}  # by the box's offset in the full tensor
        self._shape = torch.Size(shape)

    # What DCP asks of a tensor that a state dict contains.

    def size(self) -> torch.Size:
        return self._shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), view.shape) for at, view in self.views.items()]

    def __create_write_items__(self, name: str, _: object) -> list[planner.WriteItem]:
        return [
            planner.WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk, TensorProperties(self.views[tuple(chunk.offsets)].dtype), self._shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]


class Place(NamedTuple):
    """Says where a box is stored; `transform_descriptors` is a field that DCP looks for."""

    relative_path: str
    offset: int
    length: int
    crc32: int
    transform_descriptors: tuple[()] = ()


@dataclass(frozen=True)
class Found:
    """A complete checkpoint, as its manifest describes it. `extras` are in the order of the ranks."""

    folder: Path
    metadata: Metadata
    extras: list[Any]

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return self.metadata.state_dict_metadata  # type: ignore[return-value]


# Which checkpoints there are.


def folder_of(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return directory / f"step-{step}"


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints, in ascending order."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(int(found[1]) for found in map(STEP.fullmatch, names) if found)


def keep_newest(directory: Path, newest: int, number: int) -> None:
    """Keep the last `number` complete checkpoints up to step `newest`. Remove earlier and later ones.

    Later ones are from a run that went further, before this run resumed at an earlier step.
    """
    kept = [step for step in complete_steps(directory) if step <= newest][-number:]
    for step in set(complete_steps(directory)) - set(kept):
        _put_aside(folder_of(directory, step))  # one that is removed in part must not look complete
    remove_leftovers(directory)


def remove_leftovers(directory: Path) -> None:
    """Remove what belongs to no complete checkpoint, such as files of a killed job or of a failed save."""
    for name in os.listdir(directory):
        if _TEMPORARY.fullmatch(name):
            shutil.rmtree(directory / name, ignore_errors=True)


def _put_aside(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}.tmp-{os.urandom(4).hex()}"))


# Writing.


def write(final: Path, token: str, boxes: dict[str, Boxes], extra: Any, group: Group) -> None:
    """Write the boxes of all ranks as the checkpoint `final`; all ranks call it with the same `token`.

    `group` is one of gloo; None: this process writes alone. Raise WorkbookError on all ranks if one has
    failed; the checkpoint is then not there.
    """
    with in_a_sentence(f"save the checkpoint {final}"):
        dcp.save(
            boxes,
            storage_writer=Writer(final, final.with_name(f"{final.name}.tmp-{token}")),
            planner=SavePlanner(extra),
            process_group=group,
            no_dist=group is None,
        )


class SavePlanner(dcp.DefaultSavePlanner):
    """Hands DCP the boxes, and carries what each rank gave as `extra` to the rank that ends the save."""

    def __init__(self, extra: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._extra = extra

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].views[tuple(index.offset or ())]

    def create_local_plan(self) -> planner.SavePlan:
        return dataclasses.replace(super().create_local_plan(), planner_data=self._extra)

    def create_global_plan(self, plans: list[planner.SavePlan]) -> tuple[list[planner.SavePlan], Metadata]:
        extras = [plan.planner_data for plan in plans]
        plans, metadata = super().create_global_plan(plans)
        return plans, dataclasses.replace(metadata, planner_data=extras)


class Writer(dcp.FileSystemWriter):
    """Writes into a temporary folder, which gets its final name when the files of all ranks are on disk."""

    def __init__(self, final: Path, temporary: Path) -> None:
        super().__init__(temporary)
        self._final, self._folder = final, temporary

    def write_data(self, plan: planner.SavePlan, its_planner: planner.SavePlanner) -> Future[list[Any]]:
        try:
            results = super().write_data(plan, its_planner).wait()
        except (OSError, RuntimeError) as error:
            # On a full disk torch.save fails once more while it closes its archive, which hides the cause.
            cause = error if isinstance(error, OSError) else error.__context__
            raise cause if isinstance(cause, OSError) else error from error
        written: Future[list[Any]] = Future()
        places = [self._place(one.storage_data) for one in results]
        pairs = zip(results, places, strict=True)
        written.set_result([dataclasses.replace(one, storage_data=place) for one, place in pairs])
        return written

    def _place(self, info: Any) -> Place:
        with open(self._folder / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return Place(info.relative_path, info.offset, info.length, zlib.crc32(file.read(info.length)))

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the manifest, and name the folder; DCP calls this on one rank, after all have written."""
        places = {one.index: one.storage_data for of_rank in results for one in of_rank}
        saved: dict[str, TensorStorageMetadata] = metadata.state_dict_metadata  # type: ignore[assignment]
        tensors = {
            name: {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "shape": list(tensor.size),
                "boxes": [
                    [list(box.offsets), list(box.sizes), *places[MetadataIndex(name, box.offsets)][:4]]
                    for box in tensor.chunks
                ],
            }
            for name, tensor in saved.items()
        }
        text = json.dumps({"format": FORMAT, "extras": metadata.planner_data, "tensors": tensors})
        with open(self._folder / MANIFEST, "w") as file:
            file.write(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self._folder)
        if self._final.exists():  # from a run that went further, before this run resumed at an earlier step
            _put_aside(self._final)
        self._folder.rename(self._final)
        _sync_folder(self._final.parent)


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return  # Windows cannot sync a folder
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading.


def read_manifest(directory: Path, step: int) -> Found:
    """Return a complete checkpoint. Raise WorkbookError if it is missing or its manifest is damaged."""
    folder = folder_of(directory, step)
    path = folder / MANIFEST
    try:
        text, digest = path.read_text().rstrip("\n").rsplit("\n", 1)
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise ValueError("its SHA-256 is not the one in its last line")
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise WorkbookError(
                f"{path} has the format {found['format']!r}, and this program reads {FORMAT!r}: name another "
                "folder"
            )
        tensors: dict[str, Any] = {}
        places = {}
        for name, saved in found["tensors"].items():
            dtype = getattr(torch, saved["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has the dtype {dtype}")
            boxes = [ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1])) for box in saved["boxes"]]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(saved["shape"]), boxes)
            for offset, _, file, *rest in saved["boxes"]:
                if not _FILE.fullmatch(file):
                    raise ValueError(f"it names {file}, which is no file of a checkpoint")
                places[MetadataIndex(name, offset)] = Place(file, *rest)
    except FileNotFoundError:
        raise WorkbookError(f"there is no complete checkpoint of step {step} in {directory}") from None
    except OSError as error:
        raise WorkbookError(f"cannot read {path}: {reason(error)}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkbookError(f"{path} is damaged; {_way_out(folder)}") from error
    return Found(folder, Metadata(tensors, found["extras"], places), found["extras"])


def verify(found: Found, rank: int = 0, ranks: int = 1) -> None:
    """Read every byte of this rank's n-th of the files. Raise WorkbookError if one is not as it was saved.

    The sentence names the file, and the tensor in it.
    """
    files: dict[str, list[tuple[Place, str]]] = {}
    for index, place in found.metadata.storage_data.items():
        files.setdefault(place.relative_path, []).append((place, index.fqn))
    for name in sorted(files)[rank::ranks]:
        path = found.folder / name
        try:
            with open(path, "rb") as file:
                for place, tensor in sorted(files[name]):
                    is_next = file.tell() == place.offset
                    if not is_next or zlib.crc32(file.read(place.length)) != place.crc32:
                        raise WorkbookError(f"{path} is damaged, in {tensor}; {_way_out(found.folder)}")
                if file.read(1):
                    raise WorkbookError(f"{path} is longer than it was; {_way_out(found.folder)}")
        except FileNotFoundError:
            raise WorkbookError(f"{path} is missing; {_way_out(found.folder)}") from None


def _way_out(folder: Path) -> str:
    return f"remove {folder} to resume from an earlier checkpoint"


def read(found: Found, boxes: dict[str, Boxes], group: Group = None) -> None:
    """Fill the views of `boxes`; all ranks of `group`, which is one of gloo, call it. None: alone."""
    with in_a_sentence(f"load the checkpoint {found.folder}"):
        how = {"storage_reader": _Reader(found), "planner": _LoadPlanner()}
        dcp.load(boxes, process_group=group, no_dist=group is None, **how)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].views[tuple(index.offset or ())]


class _Reader(dcp.FileSystemReader):
    """Gives DCP what the manifest says: DCP's own reader would unpickle a file."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.folder)
        self._found = found

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._found.metadata


@contextmanager
def in_a_sentence(what: str) -> Iterator[None]:
    """Raise one sentence as a WorkbookError where DCP raises the tracebacks of all ranks on every rank."""
    try:
        with naming_a_lost_rank(what):
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise WorkbookError(f"cannot {what}: on rank {rank}, {reason(cause)}") from error
