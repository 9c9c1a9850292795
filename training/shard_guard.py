"""Refuse what would go wrong where a rank has shards only: the part of guard.py for ZeRO."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.launch.errors import WorkbookError


def watch_shards(wrapper: Any, shards: Iterable[Any]) -> None:
    """Refuse from now on what would see, copy, load or keep shards where it means full parameters."""
    _refuse_calls(wrapper)
    if hasattr(wrapper, "compute_dtype"):
        refuse_what_shards_cannot(wrapper)
        wrapper.register_forward_pre_hook(lambda wrapper, _: refuse_what_shards_cannot(wrapper))
    if isinstance(wrapper, nn.Module):
        _compare_versions(wrapper, shards)
        wrapper.register_forward_pre_hook(lambda *_: _refuse_frozen(shards))
        for part in wrapper.children():
            _refuse_loads(part)
    _refuse_old_gradients(wrapper, shards)


def _refuse_loads(module: nn.Module) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise WorkbookError("A rank has shards only: call the wrapper's load_full_state_dict() on all ranks.")

    for part in module.modules():
        part.register_load_state_dict_pre_hook(refuse)


def _refuse_frozen(shards: Iterable[Any]) -> None:
    """Raise WorkbookError if a shard was frozen or unfrozen, which the full parameter is not."""
    for shard in shards:
        if shard.tensor.requires_grad != shard.parameter.requires_grad:
            raise WorkbookError(
                "A shard was frozen or unfrozen after wrapping, but full parameters are trained: freeze or "
                "unfreeze the module's parameters first, and then wrap it."
            )


def _refuse_calls(wrapper: Any) -> None:
    """Refuse what torch's methods would do with the rank's shards only."""
    refused = {
        "state_dict": "A rank has shards of the parameters only: call full_state_dict() on all ranks.",
        "__deepcopy__": "Shards cannot be copied with their hooks: copy the full_state_dict() of all ranks.",
    }
    if isinstance(wrapper, Optimizer):
        refused = {
            "state_dict": "A rank has optimizer state of its own shards only: save `state_shards(model)`.",
            "add_param_group": "ZeRO has divided the parameters already: give it all of them at once.",
        }

    def refuse(sentence: str, *_: Any, **__: Any) -> NoReturn:
        raise WorkbookError(sentence)

    for name, sentence in refused.items():
        setattr(wrapper, name, functools.partial(refuse, sentence))


def refuse_what_shards_cannot(wrapper: Any) -> None:
    """Raise WorkbookError if the module has buffers that must be cast, or compiled parts."""
    if wrapper.compute_dtype is not None and any(b.is_floating_point() for b in wrapper.module.buffers()):
        raise WorkbookError("compute_dtype casts no buffers, such as those of BatchNorm: leave it out.")
    if any(part._compiled_call_impl is not None for part in wrapper.modules()):
        raise WorkbookError("ZeRO 3 frees parameters, which compiled code does not see: drop compile().")


def _compare_versions(wrapper: nn.Module, shards: Iterable[Any]) -> None:
    """Let each backward compare the shards, which it gathers again, with those of its forward."""
    versions: dict[Any, int] = {}  # torch counts the changes of a tensor

    def note(*_: Any) -> None:
        if torch.is_grad_enabled():
            versions.update((shard, shard.tensor._version) for shard in shards)

    def compare(shard: Any, _: Tensor) -> None:
        if versions.get(shard) != shard.tensor._version:
            raise WorkbookError("The optimizer has stepped between a forward and its backward.")

    wrapper.register_forward_hook(note)
    for shard in shards:
        if shard.parameter.requires_grad:
            shard.parameter.register_hook(functools.partial(compare, shard))


def _refuse_old_gradients(wrapper: Any, shards: Iterable[Any]) -> None:
    """Refuse a backward that would add to the gradients of a step that an optimizer has taken.

    `zero_grad()` of the plain model drops none of them, as they are in shards.
    """
    versions: dict[Any, int] = {}  # when the gradients were complete; torch counts a tensor's changes

    def note() -> None:
        versions.update((shard, shard.tensor._version) for shard in shards)

    def compare(_: Tensor) -> None:
        stepped = [shard for shard, version in versions.items() if shard.tensor._version != version]
        versions.clear()
        gradients = [shard.tensor.grad for shard in stepped if shard.tensor.grad is not None]
        if any(gradient.as_subclass(Tensor).any() for gradient in gradients):  # not zeros by zero_grad(False)
            raise WorkbookError(
                "The shards still have the gradients of the step before: call zero_grad() of the optimizer, "
                "or of the wrapper. That of the plain model does not find shards."
            )

    observe_calls(wrapper, "finish_gradient_sync", after=note)
    for shard in shards:
        if shard.parameter.requires_grad:
            shard.parameter.register_hook(compare)


def observe_calls(
    wrapper: Any,
    name: str,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Let `before()` and `after()` run around each call of the object's method, if it has it."""
    method = getattr(wrapper, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def observed(*args: Any, **kwargs: Any) -> Any:
        before()
        result = method(*args, **kwargs)
        after()
        return result

    setattr(wrapper, name, observed)
