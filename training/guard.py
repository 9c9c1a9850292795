"""Refuse uses of a wrapper that would train wrongly without an error. A refusal is one sentence.

      when watched       a layer has sparse gradients, or an optimizer looks at more than one number at a time
      in a forward       a parameter was added, replaced, frozen or cast after wrapping: no hook, no shard; or
                         the ranks that divide each layer have different inputs or targets
      in a backward      the gradients of the backward before it are still being sent; or the optimizer has
                         stepped since the forward, and the parameters are gathered again, with other values
      before a step      finish_gradient_sync() was forgotten: each rank has gradients of its own; step() has
                         a closure, which would compute some; or the optimizer needs all of a parameter of
                         which the rank has a shard
      with a shard       its norm, or another number for which all of the tensor is needed

The guard stands outside: it observes, and marks shards as such (`Shard`). A wrapper that is not watched
trains the same, and refuses nothing.

      @guarded class NaiveDataParallel ...      each object of the class is watched from its constructor on
      watch(model)                              the same for one object

All ranks run one program, so each notices its mistakes alone; only for inputs and targets do ranks compare
digests. What concerns shards alone is in shard_guard.py, and what a load leaves behind in loads.py.
"""

import copy
import functools
import weakref
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from comm.collectives import Group
from comm.exchange import exchange
from lab.autograd import hooks_of
from lab.check import state_digest
from lab.launch.errors import WorkbookError
from lab.trace.ledger import LEDGER
from training.elementwise import Shard, refuse_unless_elementwise
from training.loads import watch_loads
from training.shard_guard import observe_calls, watch_shards

SPARSE = "has sparse gradients, which have another size on each rank: leave sparse=True out."
GRAPH = (
    "backward(create_graph=True) keeps a graph of what is sent: for a penalty on gradients take "
    "torch.autograd.grad(..., create_graph=True), and then one plain backward."
)
Watched = TypeVar("Watched")


_guards: "weakref.WeakSet[Guard]" = weakref.WeakSet()  # the hooks of a wrapper keep its guard


def watch(wrapper: Watched) -> Watched:
    """Refuse from now on what would train wrongly with this model or optimizer; return it."""
    _guards.add(Guard(wrapper))
    return wrapper


def guarded(cls: type[Watched]) -> type[Watched]:
    """Watch each object of the decorated class from the end of its constructor on."""
    constructor = cls.__init__

    @functools.wraps(constructor)
    def construct(self: Watched, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        if type(self) is cls:  # a subclass says for itself whether it is guarded
            watch(self)

    cls.__init__ = construct  # type: ignore[assignment, method-assign]
    if issubclass(cls, nn.Module):
        cls.__deepcopy__ = _deepcopy  # type: ignore[attr-defined]
        cls.__reduce_ex__ = _refuse_to_pickle  # type: ignore[assignment, method-assign]
    return cls


def _deepcopy(wrapper: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Do what copy.deepcopy does, but for pickling."""
    copied = memo[id(wrapper)] = type(wrapper).__new__(type(wrapper))
    copied.__setstate__(copy.deepcopy(wrapper.__dict__, memo))
    return copied


def _refuse_to_pickle(wrapper: nn.Module, _: Any) -> NoReturn:
    raise WorkbookError(
        f"{type(wrapper).__name__} has hooks and groups of this process, and cannot be saved as a whole: "
        "save its state_dict(), or where ranks have shards its full_state_dict()."
    )


class Guard:
    """Observes a model or optimizer that sends gradients: by torch's hooks, and before and after its methods.

    It looks at `finish_gradient_sync()`, which ends a step's communication; at its `module`; at
    `require_backward_grad_sync`, if it sends in the backward, which is False in all microbatches but the
    last; and at what the rank trains in part: its `parameter_shards`, or its `divided` parameters. Ranks that
    have `divided` ones need equal inputs, and return shards of the logits if `returns_shard`.
    `may_freeze_later` is true for a wrapper that looks in each step which parameters are trained.
    """

    def __init__(self, wrapper: Any) -> None:
        # A weak reference: a module may outlive its wrapper, and its hooks keep the guard.
        self._wrapper, shards = weakref.ref(wrapper), getattr(wrapper, "parameter_shards", ())
        divided = getattr(wrapper, "divided", [])
        self._shards = [*divided, *(shard.tensor for shard in shards)]
        module = getattr(wrapper, "module", None)
        if module is None:
            module = nn.ParameterList(shard.parameter for shard in shards)
        refuse_layers(module)
        self._module, self._kept = module, list(module.parameters())  # kept, so that no id() is used twice
        self._wrapped = parameters_of(module)
        self._may_freeze = getattr(wrapper, "may_freeze_later", False)
        self._arrived: set[Tensor] = set()  # parameters whose gradient is not yet the mean over ranks
        self._has_local_gradients = False  # those of all microbatches but the last
        self._accepted = weakref.WeakSet[Optimizer]()
        self._sends_in_the_backward = hasattr(wrapper, "require_backward_grad_sync")
        if shards:
            watch_shards(wrapper, shards)
        watch_loads(wrapper, module)
        if isinstance(wrapper, nn.Module):  # hooks use their argument, which may be a copy of it
            wrapper.register_forward_pre_hook(lambda wrapper, _: self.refuse_changes(wrapper.module))
            wrapper.register_forward_hook(_mark_output)
            observe_calls(wrapper, "clip_grad_norm_", self.before_step)  # an optimizer's ends all before it
        else:
            refuse_unless_elementwise(type(wrapper.inner), wrapper.inner.defaults)
            self._accepted.add(wrapper.inner)
        averages = hasattr(wrapper, "finish_gradient_sync")
        for parameter in self._kept if averages else []:
            if parameter.requires_grad:
                # A hook of the tensor runs before the gradient is added, and so before the wrapper's own.
                parameter.register_hook(functools.partial(self.on_gradient, parameter))
        for parameter in divided:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(mark_gradient)
        if divided:
            _compare_first_inputs(wrapper)
        if getattr(wrapper, "returns_shard", False):
            wrapper.register_forward_hook(_mark_output_as_shard)
        observe_calls(wrapper, "finish_gradient_sync", self.before_finish, self.after_finish)
        observe_calls(wrapper, "finish", after=lambda: refuse_unequal_steps(wrapper))

    def is_concerned(self, optimizer: Optimizer, trained: set[Tensor]) -> bool:
        """Return whether the optimizer trains something of the wrapper, and is not the wrapper itself."""
        wrapper = self._wrapper()
        return wrapper not in (None, optimizer) and not trained.isdisjoint(self._shards or self._kept)

    def refuse_changes(self, module: nn.Module, is_step: bool = False) -> None:
        """Raise WorkbookError if the module has other parameters than when it was wrapped.

        Before a step, and where they may be frozen later, only those that are trained count.
        """
        now = parameters_of(module) if torch.is_grad_enabled() else self._wrapped
        changed = [name for name in self._wrapped | now if self._wrapped.get(name) != now.get(name)]
        if is_step or self._may_freeze:
            changed = [name for name in changed if name in now and now[name][1]]
        if changed:
            raise WorkbookError(
                f"The parameter {changed[0]} was added, removed, replaced, copied, frozen, unfrozen, cast or "
                "moved after wrapping, and would not be trained as on one process: change or copy the module "
                "first, then wrap it."
            )

    def on_gradient(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Refuse a second backward that would add to what is being sent. This is a hook of the parameter."""
        if gradient is None or self._wrapper() is None:
            return
        if gradient.layout != torch.strided:
            raise WorkbookError(f"A parameter of shape {tuple(parameter.shape)} {SPARSE}")
        if torch.is_grad_enabled():  # only with create_graph
            raise WorkbookError(GRAPH)
        if self._sends_in_the_backward and parameter in self._arrived:
            raise WorkbookError(
                "Another backward began before finish_gradient_sync(): set require_backward_grad_sync=False "
                "for all but the last one; a layer that passes several checkpoints needs "
                "use_reentrant=False; after an error, call finish_gradient_sync() and zero_grad()."
            )
        if getattr(self._wrapper(), "require_backward_grad_sync", True):
            self._arrived.add(parameter)
        else:
            self._has_local_gradients = True

    def before_finish(self) -> None:
        """Raise WorkbookError if a parameter was frozen or replaced: an optimizer sees no forward."""
        self.refuse_changes(self._module)
        # Autograd computes no gradient of ZeRO's shards.
        shards = [shard.tensor for shard in getattr(self._wrapper(), "parameter_shards", ())]
        if any(map(hooks_of, shards)):
            raise WorkbookError("Hooks on shards never run: use the gradients after finish_gradient_sync().")

    def after_finish(self) -> None:
        """Note that the gradients are the mean over ranks; those of shards are marked as such."""
        self._arrived.clear()
        self._has_local_gradients = False
        for shard in self._shards:
            mark_gradient(shard)

    def before_step(self) -> None:
        """Raise WorkbookError if gradients have not been averaged yet, or were not all watched."""
        # A mesh or a schedule does not run the wrapper's forward.
        self.refuse_changes(self._module, is_step=True)
        if self._arrived or self._has_local_gradients:
            raise WorkbookError("Call finish_gradient_sync() after the last backward, and before step().")

    def accept(self, optimizer: Optimizer) -> None:
        """Raise WorkbookError if the optimizer would treat shards in another way than full parameters."""
        if not self._shards or optimizer in self._accepted:
            return
        refuse_unless_elementwise(type(optimizer), optimizer.defaults)
        self._accepted.add(optimizer)


def parameters_of(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return by name what must not change of each parameter."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: (id(p), p.requires_grad, p.dtype, p.device) for name, p in named}


def _mark_output(module: nn.Module, inputs: Any, output: Any) -> None:
    """Let `loss_of` know that other ranks have losses of this model, too."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several and isinstance(output, Tensor) and not torch.compiler.is_compiling():
        output.has_other_ranks = True  # type: ignore[attr-defined]


def _mark_output_as_shard(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.as_subclass(Shard)


def _compare_first_inputs(wrapper: Any) -> None:
    """Let the ranks that divide each layer compare their inputs and targets in the first forward."""
    loss = wrapper.loss

    def compare(wrapper: Any, inputs: Any) -> None:
        handle.remove()
        refuse_unequal_inputs(inputs[0], wrapper.group)

    def compared_loss(outputs: Tensor, y: Tensor, *options: Any, **named: Any) -> Tensor:
        wrapper.loss = loss
        refuse_unequal_inputs(y, wrapper.group, "targets")
        return loss(outputs, y, *options, **named)

    handle = wrapper.register_forward_pre_hook(compare)
    wrapper.loss = compared_loss


def refuse_layers(module: nn.Module) -> None:
    """Raise WorkbookError if a layer has sparse gradients, or is a copy that torch.compile has made."""
    for name, layer in module.named_modules():
        if "_orig_mod" in layer._modules:
            raise WorkbookError(
                "torch.compile(module) changes the names of parameters: call module.compile() instead."
            )
        is_sparse = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        if is_sparse and layer.weight.requires_grad:
            raise WorkbookError(f"{name or type(layer).__name__} {SPARSE}")


def before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Run as a hook before each step of any optimizer: ask the guards of the parameters that it trains."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    guards = [guard for guard in list(_guards) if guard.is_concerned(optimizer, trained)]
    if guards and (any(args[1:]) or kwargs.get("closure")):
        raise WorkbookError("Run the backward and finish_gradient_sync() before step(), without a closure.")
    for guard in guards:
        guard.accept(optimizer)
        guard.before_step()


def after_any_step(optimizer: Optimizer, *_: Any) -> None:
    """Run as a hook after each step of any optimizer: count it as a change, which fused optimizers do not."""
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


register_optimizer_step_pre_hook(before_any_step)
register_optimizer_step_post_hook(after_any_step)


def mark_gradient(parameter: Tensor) -> None:
    """Run as a hook of a divided parameter: its gradient is a shard, too."""
    if parameter.grad is not None:
        parameter.grad = parameter.grad.as_subclass(Shard)


def refuse_unequal_inputs(x: Tensor, group: Group, what: str = "inputs") -> None:
    """Raise WorkbookError, on all ranks, unless the ranks of a tensor-parallel group have the same input."""
    with LEDGER.paused():
        digests = exchange(state_digest({"x": x}), group)
    if len(set(digests)) > 1:
        raise WorkbookError(
            f"The ranks of a tensor-parallel group have different {what}, but compute one batch: give "
            "all of them the same one (a sampler takes the rank along the data axis)."
        )


def refuse_unequal_steps(wrapper: Any) -> None:
    """Raise WorkbookError, on all ranks, unless the ranks have taken equally many steps alone."""
    with LEDGER.paused():
        steps = exchange(wrapper.steps, wrapper.group)
    if len(set(steps)) > 1:
        raise WorkbookError(f"The ranks have taken {steps} steps, so their models differ: take equally many.")
