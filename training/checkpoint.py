"""Save a training in the background, complete or not at all, and load it on any other division of the model.

      training      step 120  ──copy── step 121 ─── step 122 ─── step 123 ─── ...
                               │ to host memory
      a rank's thread          └── writes its boxes ── waits for all ranks ── step-120 is there

    checkpoints = Checkpoints("runs/first", cluster, keep=3)        # all ranks make all calls, in one order
    checkpoints.save(step, model.shards(optimizer), {"seed": 0})    # returns after the copy
    checkpoints.wait()                                              # at the end; raises if a save has failed

    checkpoints.create_state(step, optimizer)                       # of a new optimizer
    checkpoints.load(step, model.shards(optimizer))                 # fills the tensors

A shard says which elements of which full tensor a rank holds:

      a weight of 4 x 6       tensor parallelism: a box        and ZeRO on 2 ranks: a range of the box
        0  1  2  3  4  5        3  4  5                          3  4  5         .  .  .
        6  7  8  9 10 11        9 10 11                          9 10 11         .  .  .
       12 13 14 15 16 17       15 16 17                          .  .  .        15 16 17
       18 19 20 21 22 23       21 22 23                          .  .  .        21 22 23
                              offset (0, 3)                    start 0         start 6

A model that divides something among ranks has a method `shards(optimizer)`: it returns what a rank holds of
each full tensor of the model and of the optimizer's state, as `shards_of` gives it for each parameter.
Names are those of the plain model on one process; a tied parameter is given once, by its first name. Ranks
that hold the same elements all say so: one of them saves these. The optimizer's state is looked up by the
tensor that the optimizer updates, and has the same places as this tensor.

torch.distributed.checkpoint (DCP) writes boxes of full tensors, validates that they cover each tensor once,
and at load finds those that overlap what is wanted. A range of a flattened tensor of d dimensions is at most
2 d - 1 boxes: the end of a row, whole rows, and the beginning of a row.

      runs/first/                      on a file system that all machines share
          step-100/
          step-120.tmp-5f0c/           being written; becomes step-120 when all ranks are done
              __0_0.distcp             the boxes that rank 0 has saved, one after the other, without a gap
              __1_0.distcp
              manifest                 for each box its tensor's name, dtype and shape, where it lies in the
                                       tensor and in which file, and a CRC-32; what was given as `extra`.
                                       The last line is the SHA-256 of the text

DCP's own list of the boxes is a pickle, which may run any code when it is loaded. The manifest is JSON, and
torch.load reads the boxes with weights_only, so loading runs no code from the files.

To save M bytes costs M bytes of host memory on all ranks together, and 2 M bytes of memory traffic.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html; CheckFreq (Mohan et al. 2021) has the copy
and the thread; ByteCheckpoint (https://arxiv.org/abs/2407.20143) loads what any other division has saved.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import threading
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer

from comm.collectives import Group
from comm.exchange import exchange, naming_a_lost_rank, on_all, on_main
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError, reason
from lab.launch.gloo_threads import keep_from_preempting
from training.validate import validate_shared_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# DCP says so where one process saves or loads alone, as export does.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

Ints = tuple[int, ...]
FORMAT = "distributed training workbook, version 3"
MANIFEST = "manifest"
STEP = re.compile(r"step-(\d+)")
OTHER = "is of another model:"
_POLL = 0.05  # seconds between two looks at the store, while a save is awaited


# What a rank holds.


@dataclass(frozen=True, eq=False)
class Shard:
    """Holds elements of the full tensor `name`, which has `shape`: a box, a range, or all.

    The box begins at `offset` of the full tensor, and has the sizes `box`. The shard is the box's elements in
    row-major order, from number `start` on. Left out: the box is `tensor`, if it has as many dimensions as
    the full tensor, and otherwise the full tensor.

    Padding is not saved: rows of the box after the end of the full tensor, and elements after the end of the
    box. Shards of two ranks may be equal, but must not overlap in part: such a one is `is_copy`, loaded and
    not saved.

        Shard("model/weight", weight)                                       all of it, as every rank
        Shard("model/weight", columns, (4, 6), offset=(0, 3))               the box above
        Shard("model/weight", flat, (4, 6), start=12)                       ZeRO's range of the full tensor
        Shard("model/weight", flat, (4, 6), (0, 3), box=(4, 3), start=6)    ZeRO's range of the box
    """

    name: str
    tensor: Tensor
    shape: Sequence[int] | None = None
    offset: Sequence[int] | None = None
    box: Sequence[int] | None = None
    start: int = 0
    is_copy: bool = False

    @property
    def full_shape(self) -> Ints:
        return tuple(self.tensor.shape if self.shape is None else self.shape)

    @property
    def place(self) -> tuple[str, Ints, Ints, Ints, int, int]:
        """Return which elements these are: name, full shape, the box's offset and sizes, the range's ends."""
        full = self.full_shape
        offset = (0,) * len(full) if self.offset is None else tuple(self.offset)
        sizes = full if self.box is None else tuple(self.box)
        if self.box is None and self.tensor.dim() == len(full) and self.start == 0:
            sizes = tuple(self.tensor.shape)
        if full:  # rows after the end of the full tensor are padding
            sizes = (max(0, min(sizes[0], full[0] - offset[0])), *sizes[1:])
        end = max(self.start, min(self.start + self.tensor.numel(), math.prod(sizes)))
        return self.name, full, offset, sizes, self.start, end

    def boxes(self, flat: Tensor) -> Iterator["Box"]:
        """Yield the boxes of this shard, with views of `flat`: its tensor, or a copy, as one row."""
        _, full, offset, sizes, start, end = self.place
        for inside, box in boxes_of_range(start, end, sizes):
            numel = math.prod(box)
            at = tuple(a + b for a, b in zip(offset, inside, strict=True))
            yield Box(MetadataIndex(self.name, at), torch.Size(full), flat[:numel].view(box))
            flat = flat[numel:]


@dataclass(frozen=True, eq=False)
class Box:
    """Holds elements of a full tensor: its name, the box's offset in it, its shape, and a view of them."""

    index: MetadataIndex
    full: torch.Size
    view: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.index.offset or ()), self.view.shape)


def boxes_of_range(start: int, end: int, sizes: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield offset and sizes of the boxes that hold elements start to end of a tensor, in row-major order."""
    if start >= end:
        return
    if len(sizes) < 2:
        yield ((start,), (end - start,)) if sizes else ((), ())
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), end // row  # the whole rows are first..last
    if first > last:  # all elements are in one row
        for inside, box in boxes_of_range(start - last * row, end - last * row, sizes[1:]):
            yield (last, *inside), (1, *box)
        return
    for inside, box in boxes_of_range(start - (first - 1) * row, row, sizes[1:]):
        yield (first - 1, *inside), (1, *box)
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    for inside, box in boxes_of_range(0, end - last * row, sizes[1:]):
        yield (last, *inside), (1, *box)


def shards_of(
    name: str,
    trained: Tensor,
    optimizer: Optimizer | None,
    shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
    box: Sequence[int] | None = None,
    start: int = 0,
    is_copy: bool = False,
) -> Iterator[Shard]:
    """Yield the shard of a parameter that `optimizer` updates as `trained`, and those of its state."""
    where = shape, offset, box, start, is_copy
    yield Shard(f"model/{name}", _local(trained), *where)
    state = {} if optimizer is None else optimizer.state.get(trained, {})
    for kind, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            yield Shard(f"optimizer/{kind}/{name}", _local(value), *where)
        elif isinstance(value, Tensor):  # such as AdamW's number of steps, which all elements have
            yield Shard(f"optimizer/{kind}/{name}", value)


def plain_shards(model: nn.Module, optimizer: Optimizer) -> list[Shard]:
    """Return the shards of a model that each rank has in full, or whose parameters are DTensors."""
    shards: list[Shard] = []
    for name, parameter in model.named_parameters():
        shape = offset = None
        if isinstance(parameter, DTensor):
            shape, offset = parameter.shape, parameter.__create_chunk_list__()[0].offsets
        shards += shards_of(name, parameter, optimizer, shape, offset)
    kept = model.state_dict(keep_vars=True)
    return shards + [Shard(f"model/{name}", b) for name, b in model.named_buffers() if name in kept]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The checkpoints of a training.


class Checkpoints:
    """Saves and loads the checkpoints of a job in `folder`. All ranks make all calls, in the same order.

    The last `keep` complete checkpoints stay. Raise WorkbookError on all ranks if one cannot write in the
    folder, or another job saves there.
    """

    def __init__(self, folder: str | Path, cluster: Cluster, keep: int = 3, resume: bool = False) -> None:
        self._folder, self._cluster, self._keep = Path(folder), cluster, keep
        validate_shared_folder(cluster, "--checkpoint", str(folder), resume)
        self._token = on_main(cluster, f"save in {folder}", self._prepare)
        self._lost = f"checkpoint/{self._token}/lost"  # a key of the store: why no save can be completed
        # Collectives of the thread that writes must not be mixed with those of the training.
        self._group = dist.new_group(backend="gloo")
        keep_from_preempting()
        self._not_loaded = self.latest()
        self._last_saved, self._failure = -1, ""
        self._writer: threading.Thread | None = None
        self._layouts: list[str] = []
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def _prepare(self) -> str:
        claim(self._folder)
        remove_leftovers(self._folder)
        return os.urandom(4).hex()  # for the names of this job's unfinished folders

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None; the same on all ranks."""
        what = f"look for checkpoints in {self._folder}"
        return max(on_main(self._cluster, what, lambda: complete_steps(self._folder)), default=None)

    def save(self, step: int, shards: Iterable[Shard], extra: Any = None) -> None:
        """Copy the shards to host memory, and return; a thread writes them. First wait for an earlier save.

        `extra` is what rank 0 wants to have in the manifest: numbers and strings, in lists and dicts. Raise
        WorkbookError if the earlier save has failed, or if the folder has checkpoints of an earlier run, and
        this run has loaded none of them.
        """
        if self._not_loaded is not None:
            raise already_there(self._folder, self._not_loaded)
        extra = json.loads(json.dumps(extra))  # a copy: the run may change it
        self.wait()
        if step == self._last_saved:
            return
        copies = self._copied([shard for shard in shards if not shard.is_copy])
        self._writer = threading.Thread(target=self._write, args=(step, copies, extra), daemon=True)
        self._writer.start()

    def _copied(self, shards: list[Shard]) -> list[Box]:
        """Return copies, on the host, of what this rank saves. The next save uses their memory again."""
        own = [shard.place for shard in shards]
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        if (layouts := exchange(digest)) != self._layouts:
            self._layouts, self._copies = layouts, {}
            self._mine = _shared_out(exchange(own))[self._cluster.rank]
        boxes: list[Box] = []
        for shard, place in zip(shards, own, strict=True):
            if place in self._mine:
                source = shard.tensor.detach()
                if place not in self._copies:
                    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                    self._copies[place] = copy
                boxes += shard.boxes(self._copies[place].copy_(source).view(-1))
        return boxes

    def _write(self, step: int, boxes: list[Box], extra: Any) -> None:
        """Write this rank's boxes, and complete the checkpoint with the other ranks; the thread's work."""
        try:
            write(folder_of(self._folder, step), self._token, boxes, extra, self._group)
            if self._cluster.is_main:
                keep_newest(self._folder, self._keep)
            self._last_saved = step
        except BaseException as error:
            self._failure = reason(error)
            has_lost_a_rank = not isinstance(error.__cause__, dcp.CheckpointException)
            if self._cluster.is_main and has_lost_a_rank:  # the others wait for its answer
                with suppress(RuntimeError):
                    self._cluster.store.set(self._lost, self._failure)

    def wait(self) -> None:
        """Wait until the last save is on disk. Raise WorkbookError if it has failed."""
        while self._writer is not None and self._writer.is_alive():
            self._writer.join(_POLL)
            if self._writer.is_alive() and self._cluster.store.check([self._lost]):
                self._failure = self._cluster.store.get(self._lost).decode()
                break
        self._writer = None
        failure, self._failure = self._failure, ""
        if failure:
            raise WorkbookError(failure)

    def abandon(self) -> None:
        """Leave a save that is under way to its thread, without waiting: another rank has died."""
        self._writer = None

    def extra(self, step: int) -> Any:
        """Return what rank 0 gave to `save` as `extra`."""
        return self._found(step).extra

    def create_state(self, step: int, optimizer: Optimizer) -> None:
        """Give the parameters of an optimizer zeros as their state, of the kinds that a checkpoint has."""
        tensors, kinds = self._found(step).tensors, {}
        for key, saved in tensors.items():
            if key.startswith("optimizer/"):
                _, kind, name = key.split("/", 2)
                is_scalar = not saved.size and bool(tensors[f"model/{name}"].size)
                kinds[kind] = saved.properties.dtype, is_scalar
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            for kind, (dtype, is_scalar) in kinds.items():
                zeros = torch.zeros_like(torch.zeros(()) if is_scalar else parameter, dtype=dtype)
                optimizer.state[parameter].setdefault(kind, zeros)

    def _found(self, step: int) -> "Found":
        found: list[Found] = []
        on_all(self._loading(step), lambda: found.append(read_manifest(self._folder, step)))
        return found[0]

    def _loading(self, step: int) -> str:
        return f"load the checkpoint of step {step} in {self._folder}"

    def load(self, step: int, shards: Iterable[Shard]) -> None:
        """Fill the tensors of the shards, of any division of the model.

        An optimizer's state that the checkpoint does not have stays as it is. Raise WorkbookError on all
        ranks if a byte has changed, or if the tensors of all ranks together are not those that were saved.
        """
        self.wait()
        found, wanted = self._found(step), list(shards)

        def validated() -> list[str]:
            verify(found, self._cluster.rank, self._cluster.world_size)
            return _fitting(found, wanted)

        names = {name for of_rank in on_all(self._loading(step), validated) for name in of_rank}
        if left := sorted(found.tensors.keys() - names):
            raise WorkbookError(f"{found.folder} {OTHER} it has {left[0]}, and this run does not")
        fill(found, wanted, self._group)
        self._not_loaded, self._last_saved = None, step


def already_there(folder: Path, step: int) -> WorkbookError:
    """Return the error for a folder with checkpoints from which a run has not started."""
    return WorkbookError(
        f"{folder} has the checkpoint of step {step}, from which this run has not started: resume from it, "
        "or name another folder"
    )


def _shared_out(layouts: list[list[tuple[Any, ...]]]) -> list[set[tuple[Any, ...]]]:
    """Return which places each rank saves: equal ones go to the rank that has least to save so far."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, places in enumerate(layouts):
        for place in places:
            holders.setdefault(place, []).append(rank)
    elements = [0] * len(layouts)
    mine: list[set[tuple[Any, ...]]] = [set() for _ in layouts]
    for place in sorted(holders, key=lambda place: place[4] - place[5]):  # the largest first
        rank = min(holders[place], key=elements.__getitem__)
        elements[rank] += place[5] - place[4]
        mine[rank].add(place)
    return mine


def _fitting(found: "Found", wanted: Iterable[Shard]) -> list[str]:
    """Return the names of the wanted tensors. Raise WorkbookError if the model's are not those saved."""
    names = []
    for shard in wanted:
        saved = found.tensors.get(shard.name)
        if saved is None and shard.name.startswith("model/") and shard.tensor.numel():
            raise WorkbookError(f"{found.folder} {OTHER} it has no {shard.name}")
        there = saved and (tuple(saved.size), saved.properties.dtype)
        here = shard.full_shape, shard.tensor.dtype
        if there and there != here:
            raise WorkbookError(
                f"{found.folder} {OTHER} {shard.name} has shape {there[0]} and dtype {there[1]} in it, and "
                f"shape {here[0]} and dtype {here[1]} in this run"
            )
        names.append(shard.name)
    return names


_claims: dict[Path, int] = {}  # an open descriptor of each claimed folder


def claim(folder: Path) -> None:
    """Let no other process save in `folder` until this process ends, where the file system has locks."""
    path = folder.resolve()
    if fcntl is None or path in _claims:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WorkbookError(
            f"another job saves its checkpoints in {folder}: choose another folder, or wait until it ends"
        ) from None
    except OSError:
        pass  # such as NFS: it has no locks
    _claims[path] = descriptor


# Which checkpoints there are.


def folder_of(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return directory / f"step-{step}"


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints, in ascending order."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(int(found[1]) for found in map(STEP.fullmatch, names) if found)


def keep_newest(directory: Path, number: int) -> None:
    """Remove all complete checkpoints but the last `number`."""
    for step in complete_steps(directory)[:-number]:
        _put_aside(folder_of(directory, step))  # removed in part, it must not look complete
    remove_leftovers(directory)


def _put_aside(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}.tmp-{os.urandom(4).hex()}"))


def remove_leftovers(directory: Path) -> None:
    """Remove what belongs to no complete checkpoint, such as files of a killed job or of a failed save."""
    for folder in directory.glob("step-*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


# Writing and reading with DCP.


class Place(NamedTuple):
    """Says where a box is stored, with fields that DCP looks for."""

    relative_path: str
    offset: int
    length: int
    crc32: int
    transform_descriptors: tuple[()] = ()


@dataclass(frozen=True)
class Found:
    """A complete checkpoint, as its manifest describes it."""

    folder: Path
    metadata: Metadata
    extra: Any

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return self.metadata.state_dict_metadata  # type: ignore[return-value]


def write(final: Path, token: str, boxes: Iterable[Box], extra: Any, group: Group) -> None:
    """Write the boxes of all ranks as the checkpoint `final`; all ranks call it with the same `token`.

    Rank 0's `extra` counts. `group` is one of gloo; None: this process writes alone. Raise WorkbookError on
    all ranks if one has failed; the checkpoint is then not there.
    """
    writer = Writer(final, final.with_name(f"{final.name}.tmp-{token}"), extra)
    how = {"storage_writer": writer, "planner": SavePlanner(boxes), "no_dist": group is None}
    with in_a_sentence(f"save the checkpoint {final}"):
        dcp.save({}, process_group=group, **how)


class SavePlanner(dcp.DefaultSavePlanner):
    """Hands DCP the boxes, in the place of a state dict."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {box.index: box for box in boxes}

    def create_local_plan(self) -> planner.SavePlan:
        items = []
        for box in self._boxes.values():
            data = planner.TensorWriteData(box.chunk, TensorProperties(box.view.dtype), box.full)
            items.append(planner.WriteItem(box.index, planner.WriteItemType.SHARD, tensor_data=data))
        return planner.SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._boxes[index].view


class Writer(dcp.FileSystemWriter):
    """Writes into a temporary folder, which gets its final name when the files of all ranks are on disk."""

    def __init__(self, final: Path, temporary: Path, extra: Any) -> None:
        super().__init__(temporary)
        self._final, self._folder, self._extra = final, temporary, extra

    def write_data(self, plan: planner.SavePlan, its_planner: planner.SavePlanner) -> Future[list[Any]]:
        """Write this rank's boxes, and return a row of the manifest for each of them."""
        try:
            results = super().write_data(plan, its_planner).wait()
        except (OSError, RuntimeError) as error:
            # On a full disk torch.save fails once more while it closes its archive, which hides the cause.
            cause = error if isinstance(error, OSError) else error.__context__
            raise cause if isinstance(cause, OSError) else error from error
        items = {item.index: item.tensor_data for item in plan.items if item.tensor_data}
        rows = []
        for result in results:
            box, place = items[result.index], result.storage_data
            what = [result.index.fqn, str(box.properties.dtype).removeprefix("torch."), list(box.size)]
            with open(self._folder / place.relative_path, "rb") as file:
                file.seek(place.offset)
                crc32 = zlib.crc32(file.read(place.length))
            where = [list(box.chunk.offsets), list(box.chunk.sizes), place.relative_path, place.offset]
            rows.append(dataclasses.replace(result, storage_data=[*what, *where, place.length, crc32]))
        written: Future[list[Any]] = Future()
        written.set_result(rows)
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the manifest, and name the folder; DCP calls this on one rank, after all have written."""
        boxes = [result.storage_data for of_rank in results for result in of_rank]
        text = json.dumps({"format": FORMAT, "extra": self._extra, "boxes": boxes})
        with open(self._folder / MANIFEST, "w") as file:
            file.write(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
            file.flush()
            os.fsync(file.fileno())
        if self._final.exists():  # from a save that was abandoned when a rank died
            _put_aside(self._final)
        self._folder.rename(self._final)


def read_manifest(directory: Path, step: int) -> Found:
    """Return a complete checkpoint. Raise WorkbookError if it is missing or its manifest is damaged."""
    folder = folder_of(directory, step)
    path = folder / MANIFEST
    if not path.exists():
        raise WorkbookError(f"there is no complete checkpoint of step {step} in {directory}")
    text, _, digest = path.read_bytes().strip().rpartition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise _damaged(path)
    found = json.loads(text)
    if found["format"] != FORMAT:
        raise WorkbookError(f"{path} has the format {found['format']!r}, and this program reads {FORMAT!r}")
    tensors: dict[str, Any] = {}
    places = {}
    for name, dtype, full, offset, sizes, *place in found["boxes"]:
        saved = TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(full), [])
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
        tensors.setdefault(name, saved).chunks.append(chunk)
        places[MetadataIndex(name, offset)] = Place(*place)
    return Found(folder, Metadata(tensors, None, places), found["extra"])


def verify(found: Found, rank: int = 0, ranks: int = 1) -> None:
    """Read every n-th box. Raise WorkbookError, with its file and tensor, if it is not as it was saved."""
    for index, place in list(found.metadata.storage_data.items())[rank::ranks]:
        path, data = found.folder / place.relative_path, b""
        with suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        if zlib.crc32(data) != place.crc32:
            raise _damaged(path, f", in {index.fqn}")


def _damaged(path: Path, where: str = "") -> WorkbookError:
    way_out = f"remove {path.parent} to resume from an earlier checkpoint"
    return WorkbookError(f"{path} is damaged{where}; {way_out}")


def fill(found: Found, wanted: Iterable[Shard], group: Group = None) -> None:
    """Fill the tensors of the shards from a checkpoint that has their names.

    All ranks of `group`, which is one of gloo, call it. None: this process reads alone.
    """
    shards = [shard for shard in wanted if shard.name in found.tensors]
    dense = [shard.tensor.detach().contiguous() for shard in shards]  # views of the tensors, or copies
    pairs = list(zip(shards, dense, strict=True))
    boxes = [box for shard, values in pairs for box in shard.boxes(values.view(-1))]
    how = {"storage_reader": _Reader(found), "planner": _LoadPlanner(boxes), "no_dist": group is None}
    with in_a_sentence(f"load the checkpoint {found.folder}"):
        dcp.load({}, process_group=group, **how)
    for shard, values in pairs:
        if not shard.tensor.is_contiguous():
            shard.tensor.detach().copy_(values)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Asks DCP for the boxes, in the place of a state dict."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        super().__init__()
        self._boxes = {box.index: box for box in boxes}

    def create_local_plan(self) -> planner.LoadPlan:
        saved: dict[str, Any] = self.metadata.state_dict_metadata  # type: ignore[union-attr]
        items: list[planner.ReadItem] = []
        for index, box in self._boxes.items():
            items += create_read_items_for_chunk_list(index.fqn, saved[index.fqn], [box.chunk])
        return planner.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._boxes[index].view


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
