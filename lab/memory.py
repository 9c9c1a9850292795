"""Tell what a rank's training memory consists of, by the tensors that are there, not by what should be.

      storage  [========== flat gradient bucket ==========]      counts once, as gradients,
      views     grad of w0 | grad of b0 |   grad of w1          however many tensors look at it
      storage  [=== a copy not mentioned ====]                   is "other", found by the garbage collector

    sizes = live_bytes({"parameters": model.parameters(), "gradients": [p.grad for p in model.parameters()]})
    with saved_activations(model.parameters) as saved:
        loss = loss_of(model(x), y)
    print(sizes["parameters"], sizes["other"], saved.bytes)

Memory belongs to storages, not to tensors: a tensor is a dtype, a shape and a place in one (Edward Yang,
"PyTorch internals", 2019). A freed storage, as ZeRO's stage 3 leaves behind, has a size of 0.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Memory = tuple[torch.device, int]  # where a storage begins


def live_bytes(classes: Mapping[str, Iterable[Tensor | None]]) -> dict[str, int]:
    """Return the bytes of distinct storages, by class, and all others of this process as "other".

    What several classes hold belongs to the first of them. A DTensor stands for its local tensor. Garbage is
    collected first. What only autograd's graph holds is not seen: call it when there is no graph, and see
    `saved_activations`. ValueError for a class named "other".
    """
    if "other" in classes:
        raise ValueError('"other" is what belongs to no class; give yours another name.')
    counted: set[Memory] = set()

    def add_up(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            for storage in _storages(tensor):
                memory = (storage.device, storage.data_ptr())
                total += storage.nbytes() if memory not in counted else 0
                counted.add(memory)
        return total

    sizes = {name: add_up(tensors) for name, tensors in classes.items()}
    gc.collect()
    return sizes | {"other": add_up(_all_tensors())}


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Return a leaf's gradient. A subclass that acts when it is used does not notice."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad if tensor.is_leaf else None


def _all_tensors() -> Iterator[Tensor]:
    # Not isinstance(): that asks the objects themselves, and some answer with a warning or an error.
    for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]:
        yield tensor
        gradient = gradient_of(tensor)
        if gradient is not None:
            yield gradient  # perhaps no Python object yet


def _storages(tensor: Tensor | None) -> list[torch.UntypedStorage]:
    """Return the storages with memory that a tensor looks at: none for what is freed, meta or fake."""
    if tensor is None:
        return []
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [storage for part in inner if isinstance(part, Tensor) for storage in _storages(part)]
    try:
        with torch._C.DisableTorchFunctionSubclass():  # as in gradient_of
            storage = tensor.untyped_storage()
        return [storage] if storage.device.type != "meta" and storage.nbytes() else []
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass that keeps its memory to itself
        return []


@dataclass
class Saved:
    """Counts what autograd has saved for backward so far."""

    bytes: int = 0
    _seen: set[StorageWeakRef] = field(default_factory=set, repr=False)


@contextmanager
def saved_activations(parameters: Callable[[], Iterable[Tensor]]) -> Iterator[Saved]:
    """Count the bytes of distinct storages that autograd saves in the block, but for those of parameters.

    `parameters` is asked again for each saved tensor (`model.parameters`, mostly): a sharded model's are
    others while they are gathered. Put the forward alone into the block. Where it is to be recomputed
    (torch.utils.checkpoint) what is kept for that counts, and what the recomputation saves does not.
    """
    saved = Saved()

    def pack(tensor: Tensor) -> Tensor:
        known = {StorageWeakRef(storage) for p in parameters() for storage in _storages(p)}
        for storage in _storages(tensor):
            # Unlike an address, a weak reference is not used again when the storage is gone.
            reference = StorageWeakRef(storage)
            if reference not in known and reference not in saved._seen:
                saved._seen.add(reference)
                saved.bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
