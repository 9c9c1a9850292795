"""Save a training in the background, complete or not at all, and load it on any other division of the model.

      training      step 120  ──copy── step 121 ─── step 122 ─── step 123 ─── ...
                               │ to host memory
      a rank's thread          └── writes its boxes ── waits for all ranks ── step-120 is there

    checkpoints = Checkpoints("runs/first", cluster, keep=3)        # all ranks make all calls, in one order
    checkpoints.save(step, model.shards(optimizer), {"seed": 0})    # returns after the copy
    checkpoints.wait()                                              # at the end; raises if a save has failed

    create_state(optimizer, checkpoints.find(step))                 # of a new optimizer
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

torch.distributed.checkpoint (DCP) plans which boxes of full tensors are written, validates that they cover
each tensor once, and at load finds those that overlap what is wanted. A range of a flattened tensor of d
dimensions is at most 2 d - 1 boxes: the end of a row, whole rows, and the beginning of a row.

      runs/first/                      on a file system that all machines share
          step-100/
          step-120.tmp-5f0c/           being written; becomes step-120 when all ranks are done
              rank-0                   the bytes of the boxes that rank 0 has saved, without a gap
              rank-1
              manifest                 for each box its tensor's name, dtype and shape, where it lies in the
                                       tensor and in which file, and a CRC-32; what was given as `extra`.
                                       The last line is the SHA-256 of the text

The manifest is JSON. DCP's own list of the boxes is a pickle, which may run any code when it is loaded.

To save M bytes costs M bytes of host memory on all ranks together, and 2 M bytes of memory traffic.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html; CheckFreq (Mohan et al. 2021) has the copy
and the thread; ByteCheckpoint (https://arxiv.org/abs/2407.20143) loads what any other division has saved.
"""

import dataclasses
import gc
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
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer

from comm.collectives import Group
from comm.exchange import exchange, naming_a_lost_rank, on_all, on_main
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError, reason
from lab.launch.gloo_threads import keep_from_preempting
from training.finite import not_finite
from training.validate import validate_shared_folder

# DCP says so where one process loads alone, as export does.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

Ints = tuple[int, ...]
FORMAT = "distributed training workbook, version 4"
MANIFEST = "manifest"
STEP = re.compile(r"step-(\d+)")


# What a rank holds.


@dataclasses.dataclass(frozen=True, eq=False)
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
    def place(self) -> tuple[str, Ints, Ints, Ints, int, int]:
        """Return which elements these are: name, full shape, the box's offset and sizes, the range's ends."""
        full = tuple(self.tensor.shape if self.shape is None else self.shape)
        offset = tuple(self.offset or [0] * len(full))
        is_box = self.tensor.dim() == len(full) and self.start == 0
        sizes = tuple(self.box or (self.tensor.shape if is_box else full))
        if full:  # rows after the end of the full tensor are padding
            sizes = (max(0, min(sizes[0], full[0] - offset[0])), *sizes[1:])
        end = max(self.start, min(self.start + self.tensor.numel(), math.prod(sizes)))
        return self.name, full, offset, sizes, self.start, end

    def boxes(self) -> dict[Ints, Tensor]:
        """Return views of the shard's boxes, by their offsets in the full tensor. `tensor` is contiguous."""
        _, _, offset, sizes, start, end = self.place
        flat, boxes = self.tensor.detach().view(-1), {}
        for inside, box in boxes_of_range(start, end, sizes):
            at = tuple(a + b for a, b in zip(offset, inside, strict=True))
            boxes[at], flat = flat[: math.prod(box)].view(box), flat[math.prod(box) :]
        return boxes

    # DCP asks for these three.

    def size(self) -> torch.Size:
        return torch.Size(self.place[1])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), box.shape) for at, box in self.boxes().items()]

    def __create_write_items__(self, name: str, _: Any) -> list[planner.WriteItem]:
        items, kind = [], planner.WriteItemType.SHARD
        for box in self.__create_chunk_list__():
            data = planner.TensorWriteData(box, TensorProperties(self.tensor.dtype), self.size())
            items.append(planner.WriteItem(MetadataIndex(name, box.offsets), kind, tensor_data=data))
        return items


def boxes_of_range(start: int, end: int, sizes: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield offset and sizes of the boxes that hold elements start to end of a tensor, in row-major order."""
    if start >= end:
        return
    if not sizes:
        yield (), ()
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


def shards_of(name: str, trained: Tensor, optimizer: Optimizer | None, **where: Any) -> Iterator[Shard]:
    """Yield the shard of a parameter that `optimizer` updates as `trained`, and those of its state.

    `where` are the fields of Shard that say which elements `trained` has.
    """
    yield Shard(f"model/{name}", _local(trained), **where)
    state = {} if optimizer is None else optimizer.state.get(trained, {})
    for kind, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            yield Shard(f"optimizer/{kind}/{name}", _local(value), **where)
        elif isinstance(value, Tensor):  # such as AdamW's number of steps, which all elements have
            yield Shard(f"optimizer/{kind}/{name}", value)


def plain_shards(model: nn.Module, optimizer: Optimizer) -> list[Shard]:
    """Return the shards of a model that each rank has in full, or whose parameters are DTensors."""
    model = getattr(model, "_orig_mod", model)  # torch.compile(model) gives parameters other names
    shards = [Shard(f"model/{name}", buffer) for name, buffer in model.named_buffers()]
    for name, parameter in model.named_parameters():
        where = {}
        if isinstance(parameter, DTensor):
            where = {"shape": parameter.shape, "offset": parameter.__create_chunk_list__()[0].offsets}
        shards += shards_of(name, parameter, optimizer, **where)
    return shards


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The checkpoints of a training.


class Checkpoints:
    """Saves and loads the checkpoints of a job in `folder`. All ranks make all calls, in the same order.

    The last `keep` complete checkpoints stay. Raise WorkbookError on all ranks if one cannot write in the
    folder, or another job saves there.
    """

    def __init__(self, folder: str | Path, cluster: Cluster, keep: int = 3) -> None:
        self._folder, self._cluster, self._keep = Path(folder), cluster, keep
        validate_shared_folder(cluster, "--checkpoint", str(folder))
        self._token = on_main(cluster, f"save in {folder}", self._prepare)
        # Collectives of the thread that writes must not be mixed with those of the training.
        self._group: Group = dist.new_group(backend="gloo")
        keep_from_preempting()
        self._last_saved, self._failure = -1, ""
        self._writer: threading.Thread | None = None
        self._places: list[tuple[Any, ...]] = []
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def _prepare(self) -> str:
        claim(self._folder)
        remove_leftovers(self._folder)
        return os.urandom(4).hex()  # for the names of this job's unfinished folders

    def save(self, step: int, shards: Iterable[Shard], extra: Any = None) -> None:
        """Copy the shards to host memory, and return; a thread writes them. First wait for an earlier save.

        `extra` is what rank 0 wants to have in the manifest: numbers and strings, in lists and dicts. Raise
        WorkbookError if the earlier save has failed.
        """
        extra = json.loads(json.dumps(extra))  # a copy: the run may change it
        self.wait()
        if step == self._last_saved:
            return
        self._last_saved = step
        copies = self._copied([shard for shard in shards if not shard.is_copy])
        self._writer = threading.Thread(target=self._write, args=(step, copies, extra), daemon=True)
        self._writer.start()

    def _copied(self, shards: list[Shard]) -> list[Shard]:
        """Return copies, on the host, of what this rank saves. The next save uses their memory again."""
        places = [shard.place for shard in shards]
        if places != self._places:  # they change on all ranks at once: all run the same program
            self._places, self._copies = places, {}
            self._savers = _shared_out(exchange(places))
        copies = []
        for shard, place in zip(shards, places, strict=True):
            if self._savers[place] == self._cluster.rank:
                source = shard.tensor.detach()
                if place not in self._copies:
                    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                    self._copies[place] = copy
                copies.append(dataclasses.replace(shard, tensor=self._copies[place].copy_(source)))
        return copies

    def _write(self, step: int, shards: list[Shard], extra: Any) -> None:
        """Write this rank's shards, and complete the checkpoint with the other ranks; the thread's work."""
        final = self._folder / f"step-{step}"
        writer = Writer(final, final.with_name(f"{final.name}.tmp-{self._token}"), extra)
        how = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        state = {shard.name: shard for shard in shards}
        try:
            with in_a_sentence(f"save the checkpoint {final}"):
                refuse_not_finite(shards)
                dcp.save(state, storage_writer=writer, planner=how, process_group=self._group)
            if self._cluster.is_main:
                keep_newest(self._folder, self._keep)
        except BaseException as error:
            self._failure = reason(error)
        if self._failure:  # perhaps a rank has died: no other one must wait for this rank
            with suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(self._group)
            self._group = None
            gc.collect()  # the error's frames refer to the group, too

    def wait(self) -> None:
        """Wait until the last save is on disk. Raise WorkbookError if it has failed."""
        if self._writer is not None:
            self._writer.join()
        if self._failure:
            raise WorkbookError(self._failure)

    def find(self, step: int) -> "Found":
        """Return what the manifest of a step says. Raise WorkbookError on all ranks if one cannot read it."""
        found: list[Found] = []
        what = f"load the checkpoint of step {step} in {self._folder}"
        on_all(what, lambda: found.append(read_manifest(self._folder, step)))
        return found[0]

    def load(self, step: int, shards: Iterable[Shard]) -> None:
        """Fill the tensors of the shards, of any division of the model.

        An optimizer's state that the checkpoint does not have stays as it is. Raise WorkbookError on all
        ranks if a byte has changed, or if the tensors of all ranks together are not those that were saved.
        """
        self.wait()
        found, wanted = self.find(step), list(shards)
        names = {name for of_rank in exchange([shard.name for shard in wanted]) for name in of_rank}
        if left := sorted(found.tensors.keys() - names):
            raise WorkbookError(
                f"{found.folder} is of another model: it has {left[0]}, and this run does not"
            )
        fill(found, wanted, self._group)
        on_all(f"load {found.folder}", lambda: refuse_not_finite(wanted))


def refuse_not_finite(shards: Iterable[Shard]) -> None:
    """Raise WorkbookError if a number is inf or NaN: a diverged model must not replace a good one."""
    if (name := not_finite((shard.name, shard.tensor) for shard in shards)) is not None:
        raise WorkbookError(f"{name} has numbers that are not finite: the training has diverged")


def _shared_out(layouts: list[list[tuple[Any, ...]]]) -> dict[tuple[Any, ...], int]:
    """Return the rank that saves each place: of those that have it, the one with least to save so far."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, places in enumerate(layouts):
        for place in places:
            holders.setdefault(place, []).append(rank)
    elements, savers = [0] * len(layouts), {}
    for place in sorted(holders, key=lambda place: place[4] - place[5]):  # the largest first
        savers[place] = min(holders[place], key=elements.__getitem__)
        elements[savers[place]] += place[5] - place[4]
    return savers


def create_state(optimizer: Optimizer, found: "Found") -> None:
    """Give the parameters of an optimizer zeros as their state, of the kinds that a checkpoint has."""
    kinds = {}
    for key, saved in found.tensors.items():
        if key.startswith("optimizer/"):
            _, kind, name = key.split("/", 2)
            is_scalar = not saved.size and bool(found.tensors[f"model/{name}"].size)
            kinds[kind] = saved.properties.dtype, is_scalar
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        for kind, (dtype, is_scalar) in kinds.items():
            zeros = torch.zeros_like(torch.zeros(()) if is_scalar else parameter, dtype=dtype)
            optimizer.state[parameter].setdefault(kind, zeros)


# Which checkpoints there are.


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints, in ascending order."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(int(found[1]) for found in map(STEP.fullmatch, names) if found)


def keep_newest(directory: Path, number: int) -> None:
    """Remove all complete checkpoints but the last `number`."""
    for step in complete_steps(directory)[:-number]:
        _put_aside(directory / f"step-{step}")  # removed in part, it must not look complete
    remove_leftovers(directory)


def _put_aside(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}.tmp-{os.urandom(4).hex()}"))


def remove_leftovers(directory: Path) -> None:
    """Remove what belongs to no complete checkpoint, such as files of a killed job or of a failed save."""
    for folder in directory.glob("step-*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


_claims: dict[Path, int] = {}  # an open descriptor of each claimed folder


def claim(folder: Path) -> None:
    """Let no other process save in `folder` until this process ends, where the file system has locks."""
    path = folder.resolve()
    if path in _claims:
        return
    try:
        import fcntl

        _claims[path] = os.open(folder, os.O_RDONLY)
        fcntl.flock(_claims[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(_claims.pop(path))
        raise WorkbookError(
            f"another job saves its checkpoints in {folder}: choose another folder, or wait until it ends"
        ) from None
    except (ImportError, OSError):
        pass  # Windows, or a file system without locks, such as NFS


# Writing and reading with DCP.


class Found(NamedTuple):
    """A complete checkpoint, as its manifest describes it."""

    folder: Path
    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, tuple[Ints, str, int, int]]  # the box's sizes, file, start in it, CRC-32
    extra: Any


class Writer(dcp.FileSystemWriter):
    """Writes into a temporary folder, which gets its final name when the files of all ranks are on disk."""

    def __init__(self, final: Path, temporary: Path, extra: Any) -> None:
        super().__init__(temporary)
        self._final, self._folder, self._extra = final, temporary, extra

    def write_data(self, plan: planner.SavePlan, its_planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's boxes, and return a row of the manifest for each of them."""
        rows, name = [], f"rank-{self.rank}"
        with open(self._folder / name, "wb") as file:
            for item in plan.items:
                shard, at = its_planner.state_dict[item.index.fqn], tuple(item.index.offset or ())
                box = shard.boxes()[at]
                data = box.reshape(-1).view(torch.uint8).numpy()
                what = [shard.name, str(box.dtype).removeprefix("torch."), shard.size(), at, box.shape]
                where = [name, file.tell(), zlib.crc32(data)]
                file.write(data)
                rows.append(WriteResult(item.index, len(data), what + where))
            file.flush()
            os.fsync(file.fileno())
        return _done(rows)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, and name the folder; DCP calls this on one rank, after all have written."""
        boxes = [result.storage_data for of_rank in results for result in of_rank]
        text = json.dumps({"format": FORMAT, "extra": self._extra, "boxes": boxes})
        with open(self._folder / MANIFEST, "w", encoding="utf-8") as file:
            file.write(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
            file.flush()
            os.fsync(file.fileno())
        if self._final.exists():  # from an earlier attempt, in which a rank died meanwhile
            _put_aside(self._final)
        self._folder.rename(self._final)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


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
    if manifest["format"] != FORMAT:
        raise WorkbookError(
            f"{path} has the format {manifest['format']!r}, and this program reads {FORMAT!r}"
        )
    found = Found(folder, {}, {}, manifest["extra"])
    for name, dtype, full, offset, *place in manifest["boxes"]:
        saved = TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(full), [])
        found.places[MetadataIndex(name, offset)] = tuple(place)
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(place[0]))
        found.tensors.setdefault(name, saved).chunks.append(chunk)
    return found


def _damaged(path: Path, where: str = "") -> WorkbookError:
    way_out = f"remove {path.parent} to resume from an earlier checkpoint"
    return WorkbookError(f"{path} is damaged{where}; {way_out}")


def fill(found: Found, wanted: Iterable[Shard], group: Group = None) -> None:
    """Fill the tensors of the shards from a checkpoint. Optimizer's state that it does not have stays.

    All ranks of `group`, which is one of gloo, call it. None: this process reads alone. Raise WorkbookError
    on all ranks if a tensor of the model is missing, or has another shape, or if a box that one of them reads
    is not as it was saved.
    """
    shards = [
        s for s in wanted if s.name in found.tensors or (s.name.startswith("model/") and s.tensor.numel())
    ]
    dense = [dataclasses.replace(shard, tensor=shard.tensor.detach().contiguous()) for shard in shards]
    state, how = {shard.name: shard for shard in dense}, LoadPlanner(False, False)
    with in_a_sentence(f"load the checkpoint {found.folder}"):
        dcp.load(state, storage_reader=Reader(found), planner=how, process_group=group, no_dist=group is None)
    for shard, filled in zip(shards, dense, strict=True):
        if not shard.tensor.is_contiguous():
            shard.tensor.detach().copy_(filled.tensor)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Takes shards as they are: DCP's own planner looks for tensors in them."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator


class Reader(dcp.FileSystemReader):
    """Reads what the manifest says."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.folder)
        self._found = found

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata(self._found.tensors, None, self._found.places)  # type: ignore[arg-type]

    def read_data(self, plan: planner.LoadPlan, its_planner: Any) -> Future[None]:
        """Read each box of the plan, check it, and copy the part of it that is wanted."""
        for item in plan.items:
            target = its_planner.state_dict[item.dest_index.fqn].boxes()[tuple(item.dest_index.offset or ())]
            part = part_of(self._box(item.storage_index), item.storage_offsets, item.lengths)
            part_of(target, item.dest_offsets, item.lengths).copy_(part)
        return _done(None)

    def _box(self, index: MetadataIndex) -> Tensor:
        sizes, name, start, crc32 = self._found.places[index]
        dtype = self._found.tensors[index.fqn].properties.dtype
        path, data, length = self._found.folder / name, bytearray(math.prod(sizes) * dtype.itemsize), 0
        with suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(start)
            length = file.readinto(data)
        if length < len(data) or zlib.crc32(data) != crc32:
            raise _damaged(path, f", in {index.fqn}")
        return torch.frombuffer(data, dtype=dtype).view(sizes)


def part_of(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """Return a view of a box of the tensor."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


@contextmanager
def in_a_sentence(what: str) -> Iterator[None]:
    """Raise one sentence as a WorkbookError where DCP raises the tracebacks of all ranks on every rank."""
    try:
        with naming_a_lost_rank(what):
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, WorkbookError):
            raise cause from error
        raise WorkbookError(f"cannot {what}: on rank {rank}, {reason(cause)}") from error
