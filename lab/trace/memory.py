"""Measure the training memory of a rank by class of tensor: parameters, gradients, and all others.

      storage  [========== flat gradient bucket ==========]      counts once, as gradients,
      views     grad of w0 | grad of b0 |   grad of w1          although several tensors use it
      storage  [======= another copy ========]                   counts as "other"

    sizes = live_bytes({"parameters": model.parameters(), "gradients": [p.grad for p in model.parameters()]})
    with saved_activations(model.parameters) as saved:
        loss = loss_of(model(x), y)

Memory belongs to storages, not to tensors (Edward Yang, "PyTorch internals", 2019). The garbage collector
lists Python's tensors. A storage that ZeRO 3 has freed has a size of 0.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lab.trace.ledger import LEDGER
from lab.units import show_bytes, show_checked


def live_bytes(classes: Mapping[str, Iterable[Tensor | None]]) -> dict[str, int]:
    """Return the bytes of distinct storages, by class, and of all other storages of this process as "other".

    A storage that belongs to several classes counts for the first of them. Call this when there is no graph:
    tensors that only autograd's graph holds are not found.
    """
    counted: set[tuple[torch.device, int]] = set()  # the addresses of storages

    def add_up(tensors: Iterable[Tensor | None]) -> int:
        found = {(one.device, one.data_ptr()): one.nbytes() for each in tensors for one in _storages(each)}
        new = found.keys() - counted
        counted.update(new)
        return sum(found[memory] for memory in new)

    sizes = {name: add_up(tensors) for name, tensors in classes.items()}
    gc.collect()
    return sizes | {"other": add_up(_all_tensors())}


def resident_bytes() -> int:
    """Return the memory that this process holds now. It is known on Linux only, and 0 elsewhere."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _all_tensors() -> Iterator[Tensor]:
    # Not isinstance(): it calls code of the objects, and some of them warn or raise.
    for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]:
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad  # it may not be a Python object yet


def _storages(tensor: Tensor | None) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor that have memory: none if it is freed, meta or fake."""
    if tensor is None:
        return []
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = (getattr(tensor, name) for name in names)  # a DTensor names its mesh among them
        return [storage for part in parts if isinstance(part, Tensor) for storage in _storages(part)]
    try:
        storage = tensor.untyped_storage()
        return [storage] if storage.device.type != "meta" and storage.nbytes() else []
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass without access to its memory
        return []


class Saved:
    def __init__(self, ignored: Callable[[], Iterable[Tensor]]) -> None:
        self.bytes = self.peak_bytes = 0
        self._ignored = ignored
        self._seen: set[StorageWeakRef] = set()  # an address may be used again, but not while it is here
        self._alive: dict[StorageWeakRef, int] = {}

    def note(self, tensor: Tensor) -> None:
        for storage in _storages(tensor):
            if (reference := StorageWeakRef(storage)) in self._seen:
                continue
            self._seen.add(reference)
            if reference not in {StorageWeakRef(one) for each in self._ignored() for one in _storages(each)}:
                self._alive = {each: size for each, size in self._alive.items() if not each.expired()}
                self._alive[reference] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))


_watching: Saved | None = None


@contextmanager
def saved_activations(ignored: Callable[[], Iterable[Tensor]]) -> Iterator[Saved]:
    """Count the `bytes` of distinct storages that autograd saves in the block, without the `ignored`.

    `peak_bytes` is the most at a time. `ignored`, usually `model.parameters`, is called for each tensor,
    because a sharded model has other parameters while they are gathered. What a recomputation saves does not
    count.
    """
    global _watching
    saved = _watching = Saved(ignored)

    def pack(tensor: Tensor) -> Tensor:
        saved.note(tensor)
        return tensor.detach()  # an output that its own node saved would keep itself alive

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved
    finally:
        _watching = None


def note_held(*tensors: Tensor) -> None:
    """Count tensors that are kept for a later computation without autograd's help."""
    if _watching is not None:
        for tensor in tensors:
            _watching.note(tensor)


class Observed:
    """Counts in a model's first forward what autograd keeps of it, and what one of its parts then sends.

    What the loss keeps does not count. It observes by hooks of the model, from its construction on.
    """

    def __init__(self, model: nn.Module, part: nn.Module | None = None) -> None:
        self._model = model
        self.kept_bytes: int | None = None
        self.sent_bytes = 0
        self._until_forward_ends = ExitStack()
        self._hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end),
        ]
        if part is not None:
            self._hooks += [
                part.register_forward_pre_hook(lambda *_: self._count(-1)),
                part.register_forward_hook(lambda *_: self._count(1)),
                part.register_full_backward_pre_hook(lambda *_: self._count(-1)),
                part.register_full_backward_hook(lambda *_: self._count_for_the_last_time()),
            ]

    def fields(self) -> dict[str, Any]:
        """Return what the first forward has kept, and its row for `Run.finish`."""
        kept = self.kept_bytes or 0
        return {"activations_bytes": kept, "rows": {"activations": show_bytes(kept)}}

    def _begin(self, *_: Any) -> None:
        if self.kept_bytes is None and torch.is_grad_enabled():
            self._saved = self._until_forward_ends.enter_context(saved_activations(self._parameters))

    def _end(self, *_: Any) -> None:
        if self.kept_bytes is None and torch.is_grad_enabled():
            self._until_forward_ends.close()
            self.kept_bytes = self._saved.bytes

    def _parameters(self) -> Iterator[Tensor]:
        own = (p for module in self._model.modules() for p in module.parameters(recurse=False))
        for parameter in own:  # a wrapper's `parameters()` may be others
            # Where stage 3 of ZeRO has freed a parameter, one number stands for all of its.
            is_dtensor = is_traceable_wrapper_subclass(parameter)
            if is_dtensor or parameter.untyped_storage().nbytes() >= parameter.nbytes:
                yield parameter

    def _count(self, sign: int) -> None:
        self.sent_bytes += sign * LEDGER.total().bytes_sent

    def _count_for_the_last_time(self) -> None:
        self._count(1)
        for hook in self._hooks:
            hook.remove()


class MemoryReport(Observed):
    """Measures what a rank's training holds after a step, beside what it `should` hold, without padding.

    `should` has the bytes of some kinds of tensors by their names in `measure`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, should: object | None = None) -> None:
        super().__init__(model)
        self._optimizer = optimizer
        self._should = {} if should is None else vars(should)

    def measure(self) -> dict[str, int]:
        """Return the bytes that are held now by kind, and the activations of the first forward (or 0)."""
        groups = self._optimizer.param_groups
        parameters = [*self._parameters(), *(p for group in groups for p in group["params"])]
        states = [item for state in self._optimizer.state.values() for item in state.items()]
        state = [(name, tensor) for name, tensor in states if isinstance(tensor, Tensor)]
        sizes = live_bytes(
            {
                "parameters": parameters,
                "gradients": [parameter.grad for parameter in parameters],
                "optimizer_state": [tensor for name, tensor in state if name != "step"],
                # AdamW counts its steps, for each parameter.
                "step_counters": [tensor for name, tensor in state if name == "step"],
            }
        )
        other = sizes.pop("other")
        return {**sizes, "other_tensors": other, "activations": self.kept_bytes or 0}

    def fields(self) -> dict[str, Any]:
        """Return what this rank holds and should hold, and the rows for `Run.finish`.

        What it holds beyond the formula is padding.
        """
        held, should = self.measure(), self._should
        kept = ", ".join(f"{show_bytes(held[name])} of {name.replace('_', ' ')}" for name in should)
        kept += show_checked([held[name] for name in should], list(should.values()))
        return {
            **{f"{name}_bytes": size for name, size in held.items()},
            "padding_bytes": sum(held[name] - size for name, size in should.items()),
            **{f"formula_{name}_bytes": size for name, size in should.items()},
            "rows": {"a rank keeps": kept, "activations": show_bytes(held["activations"])},
        }
