"""Refuse, in one sentence, the uses of a wrapper that would train wrongly without an error.

      at wrapping        a layer has sparse gradients, or an optimizer looks at more than one number at a time
      in a forward       a parameter was added, replaced, frozen or cast after wrapping: no hook, no shard
      in a backward      the gradients of the backward before it are still being sent
      before a step      finish_gradient_sync() was forgotten: each rank has gradients of its own; or the
                         optimizer needs all of a parameter of which the rank has a shard
      with a shard       its norm, or another number for which all of the tensor is needed

All ranks run the same program, so they make the same mistake, and each rank notices it without the others.
"""

import contextlib
import inspect
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from comm.collectives import Group
from comm.exchange import exchange
from lab.check import state_digest
from lab.launch.errors import WorkbookError
from lab.trace.ledger import LEDGER

SPARSE = "has sparse gradients, which have another size on each rank: leave sparse=True out."
NEEDS_ALL = {  # and all functions that return one number
    *("sum", "mean", "norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm", "normalize", "cumsum"),
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "topk", "sort", "median", "multinomial"),
    *("var", "std_mean", "softmax", "log_softmax", "logsumexp", "cross_entropy", "nll_loss", "std"),
}


class Shard(Tensor):
    """A rank's part of a gradient or of logits: it refuses operations that need all parts.

    `tensor.as_subclass(Shard)` makes one, and `shard.as_subclass(Tensor)` is a plain tensor again.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        needs_all = func.__name__ in NEEDS_ALL
        if not needs_all:
            result = super().__torch_function__(func, types, args, kwargs or {})
            needs_all = isinstance(result, Tensor) and result.dim() == 0
        if needs_all:
            raise WorkbookError(
                f"{func.__name__}() would see this rank's shard only: clip with the model's own "
                "clip_grad_norm_(), compute the loss with its loss(), or take the plain tensor, "
                "shard.as_subclass(torch.Tensor)."
            )
        return result


_guards: "weakref.WeakSet[Guard]" = weakref.WeakSet()


def _mark_output(module: nn.Module, inputs: Any, output: Any) -> None:
    """Let `loss_of` know that other ranks have losses of this model, too."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several and isinstance(output, Tensor) and not torch.compiler.is_compiling():
        output.has_other_ranks = True  # type: ignore[attr-defined]


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


def mark_gradient(parameter: Tensor) -> None:
    """Run as a hook of a divided parameter: its gradient is a shard, too."""
    if parameter.grad is not None:
        parameter.grad = parameter.grad.as_subclass(Shard)


def refuse_unequal_inputs(x: Tensor, group: Group) -> None:
    """Raise WorkbookError, on all ranks, unless the ranks of a tensor-parallel group have the same input."""
    with LEDGER.paused():
        digests = exchange(state_digest({"x": x}), group)
    if len(set(digests)) > 1:
        raise WorkbookError(
            "The ranks of a tensor-parallel group have different inputs, but compute one batch: give "
            "all of them the same one (a sampler takes the rank along the data axis)."
        )


def refuse_unless_elementwise(optimizer_class: type[Optimizer], options: dict[str, Any]) -> None:
    """Raise WorkbookError unless the optimizer updates a parameter in two parts as it updates all of it."""
    random = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(3, 24, generator=random, dtype=torch.float64)

    def trained(sizes: list[int], shape: tuple[int, ...]) -> Tensor:
        """Return the values after two steps, as parameters of these sizes."""
        parts = [nn.Parameter(part.clone().view(shape)) for part in values.split(sizes)]
        optimizer = optimizer_class(parts, **options)
        for gradient in gradients:
            for part, its_gradient in zip(parts, gradient.split(sizes), strict=True):
                part.grad = its_gradient.clone().view(shape)
            optimizer.step()
        return torch.cat([part.detach().flatten() for part in parts])

    try:
        is_elementwise = torch.equal(trained([24], (4, 6)), trained([13, 11], (1, -1)))
    except (TypeError, ValueError, RuntimeError):  # such as Muon, which takes matrices only
        is_elementwise = False
    if not is_elementwise:
        raise WorkbookError(
            f"{optimizer_class.__name__} does not work element by element, so it cannot train a shard of a "
            "parameter: take one that does, such as SGD, Adam or AdamW."
        )
