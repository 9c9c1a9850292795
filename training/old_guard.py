"""Guard wrappers that are not converted yet."""

import contextlib
import inspect
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lab.launch.errors import WorkbookError
from training.guard import SPARSE, _mark_output, refuse_unless_elementwise

_guards: "weakref.WeakSet[Guard]" = weakref.WeakSet()


class Guard:
    """Watches how a wrapper of `module` is used: the wrapper reports forwards, gradients and their mean.

    A wrapper that has parameters but no module passes nn.ParameterList(parameters). `shards` are those
    parameters that the rank has in part: an optimizer of them must work element by element.
    """

    def __init__(self, module: nn.Module, shards: Collection[nn.Parameter] = ()) -> None:
        for name, layer in module.named_modules():
            if "_orig_mod" in layer._modules:
                raise WorkbookError(
                    "torch.compile(module) changes the names of parameters: call module.compile() instead."
                )
            is_sparse = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
            if is_sparse and layer.weight.requires_grad:
                raise WorkbookError(f"{name or type(layer).__name__} {SPARSE}")
        self.is_synchronising = True  # False inside no_sync()
        self._module, self._kept = module, list(module.parameters())  # kept, so that no id() is used twice
        self._wrapped = self._parameters()
        self._has_local_gradients = False  # those of no_sync()
        self.arrived: set[Tensor] = set()  # parameters whose gradient is not yet the mean over ranks
        self._shards, self._accepted = set(shards), weakref.WeakSet[Optimizer]()
        module.register_forward_hook(_mark_output)
        _guards.add(self)

    @property
    def trained(self) -> set[nn.Parameter]:
        """Return what an optimizer of the wrapper gets."""
        return self._shards or set(self._kept)

    def _parameters(self) -> dict[str, tuple[Any, ...]]:
        named = self._module.named_parameters(remove_duplicate=False)
        return {name: (id(p), p.requires_grad, p.dtype, p.device) for name, p in named}

    def before_forward(self, is_step: bool = False) -> None:
        """Raise WorkbookError if the module has other parameters than when it was wrapped.

        Before a step, only those that are trained count.
        """
        now = self._parameters() if torch.is_grad_enabled() else self._wrapped
        changed = [name for name in self._wrapped | now if self._wrapped.get(name) != now.get(name)]
        if is_step:
            changed = [name for name in changed if name in now and now[name][1]]
        if changed:
            raise WorkbookError(
                f"The parameter {changed[0]} was added, removed, replaced, copied, frozen, unfrozen, cast or "
                "moved after wrapping, and would not be trained as on one process: change or copy the module "
                "first, then wrap it."
            )

    def note_arrival(self, parameter: Tensor) -> bool:
        """Note that the parameter's gradient has arrived; return False if autograd's result was None.

        Call it in the hook of `parameter`. It refuses a second backward that adds to what is being sent.
        """
        gradient = parameter.grad
        if gradient is None:
            return False
        if gradient.layout != torch.strided:
            raise WorkbookError(f"A parameter of shape {tuple(parameter.shape)} {SPARSE}")
        if parameter in self.arrived:
            raise WorkbookError(
                "Another backward began before finish_gradient_sync(): run all but the last one inside "
                "no_sync(); a layer that passes several checkpoints needs use_reentrant=False; after an "
                "error, call finish_gradient_sync() and zero_grad()."
            )
        if self.is_synchronising:
            self.arrived.add(parameter)
        return True

    def watch(self) -> None:
        """Note each gradient that a backward makes. A wrapper needs it that has no hooks of its own."""
        for parameter in self.trained:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrived.add)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark the backwards of all microbatches but the last: their gradients add up."""
        self.is_synchronising, self._has_local_gradients = False, True
        try:
            yield
        finally:
            self.is_synchronising = True

    def expect_gradients(self) -> None:
        """Prepare for the next backward: none of its gradients has arrived."""
        self.arrived.clear()
        self._has_local_gradients = False

    def before_step(self) -> None:
        """Raise WorkbookError if gradients have not been averaged yet, or were not all watched."""
        self.before_forward(is_step=True)  # a mesh or a schedule does not run the wrapper's forward
        if self.arrived or self._has_local_gradients:
            raise WorkbookError("Call finish_gradient_sync() after the last backward, and before step().")

    def accept(self, optimizer: Optimizer) -> None:
        """Raise WorkbookError if the optimizer would treat shards in another way than full parameters."""
        if not self._shards or optimizer in self._accepted:
            return
        known = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in known}
        refuse_unless_elementwise(type(optimizer), options)
        self._accepted.add(optimizer)


def before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Run as a hook before each step of any optimizer: ask the guards of the parameters that it trains."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    guards = [guard for guard in _guards if not trained.isdisjoint(guard.trained)]
    closure: Any = kwargs.get("closure") or (args[1] if len(args) > 1 else None)

    def check() -> None:
        for guard in guards:
            guard.before_step()

    def checked_closure() -> Any:
        loss = closure()
        check()
        return loss

    for guard in guards:
        guard.accept(optimizer)
    if closure is not None:
        return args[:1], {"closure": checked_closure}
    check()
    return None


register_optimizer_step_pre_hook(before_any_step)
