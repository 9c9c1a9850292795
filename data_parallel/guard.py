"""Refuse the uses of a wrapper that would let the replicas drift apart, each with one clear sentence.

      at wrapping         a layer has sparse gradients                 another size on each rank
      in a forward        a parameter is new since the wrapping        no hook, and perhaps other values
      in a backward       the last gradients are still in flight       autograd adds to what is being sent
      before a step       finish_gradient_sync() was forgotten         each rank has gradients of its own

All ranks run the same program, so they make the same mistake, and each rank notices it without the others.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from data_parallel.hook_gradients import NO_SPARSE, HookGradients
from data_parallel.no_sync import NoSync
from lab.launch.errors import WorkbookError

_hooks = WeakTensorKeyDictionary()  # of each parameter, the hook of its last wrapper


def replace_hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` when the gradient of `parameter` is complete, instead of an earlier wrapper's hook."""
    earlier: RemovableHandle | None = _hooks.get(parameter)
    if earlier is not None:
        earlier.remove()
    _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)


class ReplicaGuard(NoSync):
    """Watches how a wrapper of `module` is used. The wrapper reports forwards, gradients and their mean."""

    def __init__(self, module: nn.Module) -> None:
        refuse_sparse_layers(module)
        self._module = module
        self._wrapped = {p: _kind(p) for p in module.parameters() if p.requires_grad}
        self._gradients = HookGradients()
        self._has_own_gradients = False
        for parameter in self._wrapped:
            replace_hook(parameter, self._look)
        for other in [guard for guard in _guards if not guard._wrapped.keys().isdisjoint(self._wrapped)]:
            _guards.discard(other)  # of an earlier wrapper
        _guards.add(self)

    def before_forward(self) -> None:
        """Raise WorkbookError if a trained parameter was not there when the module was wrapped."""
        if not torch.is_grad_enabled():
            return
        for parameter in self._module.parameters():
            if parameter.requires_grad and self._wrapped.get(parameter) != _kind(parameter):
                name = next(name for name, p in self._module.named_parameters() if p is parameter)
                raise WorkbookError(
                    f"{name} was unfrozen, replaced, cast, moved or added after the module was wrapped, and "
                    "would not be synchronised: wrap the module again."
                )

    def has_gradient(self, parameter: Tensor) -> bool:
        """Return whether a hook's parameter has its complete gradient; refuse a sparse one."""
        is_complete = self._gradients.is_complete(parameter)
        if parameter.grad is not None and self.is_synchronising:
            self._has_own_gradients = True
        return is_complete

    def _look(self, parameter: Tensor) -> None:
        self.has_gradient(parameter)

    def refuse_unless_dropped(self, parameter: nn.Parameter, is_kept: bool) -> None:
        """Raise WorkbookError in a second backward, unless the program has dropped the first one's gradients.

        A GAN's loop drops the gradients that the generator's backward leaves in the discriminator. If they
        are kept, autograd has added to what is being sent. `is_kept` is True if the gradient of the hook's
        `parameter` was kept, or if messages are left to send: other ranks may have sent more or fewer.
        """
        if is_kept or any(p.grad is not None for p in self._wrapped if p is not parameter):
            raise WorkbookError(
                "Another backward began before finish_gradient_sync(): run all but the last one inside "
                "no_sync() (the generator's inside the discriminator's, in a GAN); after an error, call "
                "finish_gradient_sync() and zero_grad()."
            )

    def synchronised(self) -> None:
        """Note that all gradients are the mean over ranks."""
        self._has_own_gradients = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise WorkbookError if the optimizer is about to step with this rank's own gradients."""
        if self._has_own_gradients and any(
            p in self._wrapped for group in optimizer.param_groups for p in group["params"]
        ):
            raise WorkbookError(
                "optimizer.step() came before finish_gradient_sync(), and would let the ranks drift apart: "
                "call finish_gradient_sync() first, after the last backward."
            )


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


_guards: "weakref.WeakSet[ReplicaGuard]" = weakref.WeakSet()


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for guard in _guards:
        guard.before_step(optimizer)


register_optimizer_step_pre_hook(_before_any_step)


def refuse_sparse_layers(module: nn.Module) -> None:
    """Raise WorkbookError for an embedding whose gradients are sparse."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise WorkbookError(f"{name or type(layer).__name__} has a sparse gradient: {NO_SPARSE}")
