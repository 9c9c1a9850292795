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

A model that divides something among ranks has one method for its checkpoints:

    def shards(self, optimizer) -> list[Shard]:
        "Return what this rank holds of each full tensor of the model, and of the optimizer's state."
        return [
            shard
            for name, parameter in self.module.named_parameters()
            for shard in shards_of(name, parameter, optimizer, self.full_shapes[name], self.offsets[name])
        ]

Names are those of the plain model on one process; a tied parameter is given once, by its first name. Ranks
that hold the same elements all say so: one of them saves these. The optimizer's state is looked up by the
tensor that the optimizer updates, and has the same places as this tensor.

torch.distributed.checkpoint saves boxes. A range of a flattened tensor of d dimensions is at most 2 d - 1 of
them: the end of a row, whole rows, and the beginning of a row. training/checkpoint_storage.py describes the
files. To save M bytes costs M bytes of host memory on all ranks together, and 2 M bytes of memory traffic.
CheckFreq (Mohan et al. 2021) has the copy and the thread; ByteCheckpoint (https://arxiv.org/abs/2407.20143)
loads what any other division has saved.
"""

import hashlib
import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from comm.exchange import exchange, on_all, on_main
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError, reason
from lab.launch.gloo_threads import keep_from_preempting
from training import checkpoint_storage as storage
from training.checkpoint_storage import Boxes, Found, Ints
from training.validate import validate_shared_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_POLL = 0.05  # seconds between two looks at the store, while a save is awaited


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

    def add_to(self, boxes: dict[str, Boxes], tensor: Tensor | None = None) -> None:
        """Add views of this shard's tensor, or of a flat `tensor` in its place, for each of its boxes."""
        _, full, offset, sizes, start, end = self.place
        flat = self.tensor.detach().view(-1) if tensor is None else tensor
        at = 0
        for inside, box in boxes_of_range(start, end, sizes):
            views = boxes.setdefault(self.name, Boxes(full)).views
            numel = math.prod(box)
            views[tuple(a + b for a, b in zip(offset, inside, strict=True))] = flat[at : at + numel].view(box)
            at += numel


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
            shape, offset = parameter.shape, _offset(parameter)
        shards += shards_of(name, parameter, optimizer, shape, offset)
    kept = model.state_dict(keep_vars=True)
    return shards + [Shard(f"model/{name}", b) for name, b in model.named_buffers() if name in kept]


def _offset(parameter: DTensor) -> Ints:
    """Return where this rank's rows of a DTensor begin, which one dimension of a mesh may divide evenly."""
    offset = [0] * parameter.dim()
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            each = -(-parameter.shape[dim] // parameter.device_mesh.size(axis))
            offset[dim] = min(each * parameter.device_mesh.get_local_rank(axis), parameter.shape[dim])
    return tuple(offset)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Checkpoints:
    """Saves and loads the checkpoints of a job in `folder`. All ranks make all calls, in the same order.

    The last `keep` complete checkpoints stay. Raise WorkbookError on all ranks if one cannot write in the
    folder, or another job saves there.
    """

    def __init__(self, folder: str | Path, cluster: Cluster, keep: int = 3, resume: bool = False) -> None:
        if keep < 1:
            raise WorkbookError(f"keep is {keep}; at least 1 checkpoint must stay.")
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
        self._own_names: set[str] = set()
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def _prepare(self) -> str:
        claim(self._folder)
        storage.remove_leftovers(self._folder)
        return os.urandom(4).hex()  # for the names of this job's unfinished folders

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None; the same on all ranks."""
        steps = on_main(
            self._cluster,
            f"look for checkpoints in {self._folder}",
            lambda: storage.complete_steps(self._folder),
        )
        return max(steps, default=None)

    def save(self, step: int, shards: Iterable[Shard], extra: Any = None) -> None:
        """Copy the shards to host memory, and return; a thread writes them. First wait for an earlier save.

        `extra` is what this rank needs besides: numbers and strings, in lists and dicts. Raise WorkbookError
        if the folder has checkpoints of an earlier run, and this run has loaded none of them.
        """
        if self._not_loaded is not None:
            raise already_there(self._folder, self._not_loaded)
        extra = json.loads(json.dumps(extra))  # a copy: the run may change it
        self._finish_writing()
        if step == self._last_saved:
            return
        copies = self._copied(list(shards))
        self._writer = threading.Thread(target=self._write, args=(step, copies, extra), daemon=True)
        self._writer.start()

    def _copied(self, shards: list[Shard]) -> dict[str, Boxes]:
        """Return copies, on the host, of what this rank saves. The next save uses their memory again."""
        shards = [shard for shard in shards if not shard.is_copy]
        own = [shard.place for shard in shards]
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        if (layouts := exchange(digest)) != self._layouts:
            self._layouts, self._copies = layouts, {}
            self._mine = _shared_out(exchange(own))[self._cluster.rank]
        boxes: dict[str, Boxes] = {}
        for shard, place in zip(shards, own, strict=True):
            if place not in self._mine:
                continue
            source = shard.tensor.detach()
            copy = self._copies.get(place)
            if copy is None or copy.dtype != source.dtype:
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._copies[place] = copy
            copy.copy_(source)
            shard.add_to(boxes, copy.view(-1))
        return boxes

    def _write(self, step: int, boxes: dict[str, Boxes], extra: Any) -> None:
        """Write this rank's boxes, and complete the checkpoint with the other ranks; the thread's work."""
        try:
            final = storage.folder_of(self._folder, step)
            storage.write(final, self._token, boxes, extra, self._group)
            if self._cluster.is_main:
                storage.keep_newest(self._folder, step, self._keep)
            self._last_saved = step
        except BaseException as error:
            self._failure = self._failure or reason(error)
            if self._cluster.is_main and isinstance(error.__cause__, CheckpointException):
                print(f"{reason(error)}; training goes on", file=sys.stderr, flush=True)
                storage.remove_leftovers(self._folder)
            elif self._cluster.is_main:  # it has lost a rank, and the others wait for its answer
                with suppress(RuntimeError):
                    self._cluster.store.set(self._lost, reason(error))

    def wait(self) -> None:
        """Wait for the last save. Raise WorkbookError if a save has failed since `wait` was last called."""
        self._finish_writing()
        failure, self._failure = self._failure, ""
        if failure:
            raise WorkbookError(failure)

    def _finish_writing(self) -> None:
        while self._writer is not None:
            self._writer.join(_POLL)
            if not self._writer.is_alive():
                self._writer = None
            elif self._cluster.store.check([self._lost]):
                self._writer = None
                raise WorkbookError(self._cluster.store.get(self._lost).decode())

    def abandon(self) -> None:
        """Leave a save that is under way to its thread, without waiting: another rank has died."""
        self._writer = None

    def extras(self, step: int) -> list[Any]:
        """Return what each rank gave to `save` as `extra`, in the order of the ranks that saved."""
        return json.loads(self._of_manifest(step, lambda found: json.dumps(found.extras)))

    def create_state(self, step: int, optimizer: Optimizer) -> None:
        """Give the parameters of an optimizer zeros as their state, of the kinds that a checkpoint has."""
        for kind, (dtype, is_scalar) in self._of_manifest(step, _kinds).items():
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            for parameter in trained:
                like = {"dtype": getattr(torch, dtype)}
                zeros = torch.zeros((), **like) if is_scalar else torch.zeros_like(parameter, **like)
                optimizer.state[parameter].setdefault(kind, zeros)

    def _of_manifest(self, step: int, what_of: Any) -> Any:
        return on_main(
            self._cluster,
            f"load the checkpoint of step {step} in {self._folder}",
            lambda: what_of(storage.read_manifest(self._folder, step)),
        )

    def load(self, step: int, shards: Iterable[Shard]) -> None:
        """Fill the tensors of the shards, of any division of the model.

        An optimizer's state that the checkpoint does not have stays as it is. Later checkpoints than this one
        are removed when the next one is complete. Raise WorkbookError on all ranks if a byte has changed, or
        if the tensors of all ranks together are not those that were saved.
        """
        self._finish_writing()
        what, wanted = f"load the checkpoint of step {step} in {self._folder}", list(shards)
        found: list[Found] = []

        def look() -> list[str]:
            found.append(storage.read_manifest(self._folder, step))
            names = _fitting(found[0], wanted)
            storage.verify(found[0], self._cluster.rank, self._cluster.world_size)
            return names

        names = {name for of_rank in on_all(what, look) for name in of_rank}
        if left := sorted(found[0].tensors.keys() - names):
            raise WorkbookError(
                f"{found[0].folder} is of another model: it has {left[0]}, and this run does not"
            )
        fill(found[0], wanted, self._group)
        self._not_loaded, self._last_saved = None, step


def fill(found: Found, wanted: Iterable[Shard], group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of the shards from a checkpoint that has their names."""
    boxes: dict[str, Boxes] = {}
    into: list[tuple[Shard, Tensor]] = []
    for shard in wanted:
        if shard.name not in found.tensors:
            continue
        if shard.tensor.is_contiguous():
            shard.add_to(boxes)
        else:
            into.append((shard, torch.empty_like(shard.tensor, memory_format=torch.contiguous_format)))
            shard.add_to(boxes, into[-1][1].view(-1))
    storage.read(found, boxes, group)
    for shard, dense in into:
        shard.tensor.detach().copy_(dense)


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


def _kinds(found: Found) -> dict[str, tuple[str, bool]]:
    """Return the kinds of an optimizer's state: the dtype, and whether it is one number for a parameter."""
    kinds = {}
    for key, saved in found.tensors.items():
        if key.startswith("optimizer/"):
            _, kind, name = key.split("/", 2)
            is_scalar = not saved.size and bool(found.tensors[f"model/{name}"].size)
            kinds[kind] = str(saved.properties.dtype).removeprefix("torch."), is_scalar
    return kinds


def _fitting(found: Found, wanted: Iterable[Shard]) -> list[str]:
    """Return the names of the wanted tensors. Raise WorkbookError if the model's are not those saved."""
    names = []
    for shard in wanted:
        saved = found.tensors.get(shard.name)
        if saved is None and shard.name.startswith("optimizer/"):
            continue
        if saved is None and shard.tensor.numel():
            raise WorkbookError(f"{found.folder} is of another model: it has no {shard.name}")
        there = saved and (tuple(saved.size), saved.properties.dtype)
        here = shard.full_shape, shard.tensor.dtype
        if there and there != here:
            raise WorkbookError(
                f"{found.folder} is of another model: {shard.name} has shape {there[0]} and dtype {there[1]} "
                f"in it, and shape {here[0]} and dtype {here[1]} in this run"
            )
        names.append(shard.name)
    return names


def already_there(folder: Path, step: int) -> WorkbookError:
    """Return the error for a folder with checkpoints from which a run has not started."""
    return WorkbookError(
        f"{folder} has the checkpoint of step {step}, from which this run has not started: resume from it, "
        "or name another folder"
    )


_claims: dict[tuple[int, int], int] = {}  # st_dev and st_ino of a folder -> its open descriptor


def claim(folder: Path) -> None:
    """Create `folder` if needed, and let no other process save there until this process ends.

    Raise WorkbookError if another process has claimed it: two jobs would replace each other's checkpoints. On
    a file system that cannot lock a folder (NFS) this is not detected.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    found = os.fstat(descriptor)
    if (found.st_dev, found.st_ino) in _claims:
        os.close(descriptor)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WorkbookError(
            f"another job saves its checkpoints in {folder}: choose another folder, or wait until it ends"
        ) from None
    except OSError:
        pass  # this file system has no locks
    _claims[found.st_dev, found.st_ino] = descriptor
