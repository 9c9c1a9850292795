"""Train with a wrapper, and compare each gradient and each parameter with one process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from comm.collectives import Group, all_reduce, broadcast, use_pattern
from comm.wire.groups import own_group
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.text import rank_slice
from tests.tasks import Loss, Task
from tests.wrappers import Wrapper

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    # On GPUs either all parameters must be DTensors for the default of foreach, or none.
    "sgd": (torch.optim.SGD, {"lr": 1.0, "foreach": False}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    # The gradient of a key's bias is zero except for rounding, which AdamW would magnify with a smaller eps.
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
}


class Trained:
    """A wrapper and its optimizer, with the same method names for all wrappers."""

    def __init__(
        self,
        wrapper: Wrapper,
        module: nn.Module,
        optimizer: str = "sgd",
        group: Group = None,
        pattern: str | None = None,
        **options: Any,
    ) -> None:
        use_pattern(pattern, group)
        optimizer_class, defaults = OPTIMIZERS[optimizer]
        self.wrapper, self.module = wrapper, module
        if wrapper.is_optimizer:
            for buffer in module.buffers():  # an optimizer does not see them
                broadcast(buffer, group=group)
            self.model = module
            self.syncing = self.optimizer = wrapper.make(
                module.parameters(), optimizer_class, group=group, **options, **defaults
            )
        else:
            if wrapper.takes_group:
                options["group"] = group
            self.model = self.syncing = wrapper.make(module, **options)
            self.optimizer = optimizer_class(self.model.parameters(), **defaults)

    def accumulate(
        self, loss: Loss, batch: Sequence[Tensor], microbatches: int = 1, is_complete: bool = True
    ) -> Tensor:
        """Compute the gradients of a step from this rank's part of the batch, and return its loss.

        Unless it `is_complete`, more microbatches are to follow.
        """
        wrapper, losses = self.wrapper, []
        parts = list(zip(*(part.chunk(microbatches) for part in batch), strict=True))
        for i, (x, y) in enumerate(parts):
            is_last = is_complete and i == len(parts) - 1
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(is_last)
            elif wrapper.stage != 2:
                self.syncing.require_backward_grad_sync = is_last
            uses_dtensors = wrapper.by_torch and wrapper.takes_full_batch
            with loss_parallel() if uses_dtensors else contextlib.nullcontext():
                if wrapper.takes_full_batch:
                    of_part = self.model.loss(self.model(x), y)
                else:
                    of_part = loss(self.model, x, y)
                (of_part / microbatches).backward()
            losses.append(of_part.detach())
            if is_last or wrapper.stage == 2:  # which keeps no gradients until the next microbatch
                self.syncing.finish_gradient_sync()
        full = [one.full_tensor() if isinstance(one, DTensor) else one for one in losses]
        return torch.stack(full).mean()

    def step(self) -> dict[str, Tensor]:
        """Let the optimizer step, and return by how much each parameter has become smaller.

        With SGD and a rate of 1 that is the gradient, which each wrapper keeps in another way.
        """
        before = self.state()
        self.optimizer.step()
        return {name: before[name] - after for name, after in self.state().items()}

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the full parameters and buffers, on all ranks."""
        is_divided = self.wrapper.is_divided
        state = self.model.full_state_dict() if is_divided else self.module.state_dict()
        return {name: tensor.detach().clone() for name, tensor in state.items()}


def mine(cluster: Cluster, batch: Sequence[Tensor]) -> list[Tensor]:
    return [rank_slice(part, cluster.rank, cluster.world_size) for part in batch]


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Run all microbatches but the last in the block, as a lesson's loop does."""
    model.require_backward_grad_sync = False
    try:
        yield
    finally:
        model.require_backward_grad_sync = True


def accumulate(model: Any, loss: Loss, batch: Sequence[Tensor], microbatches: int) -> None:
    """Compute the gradients of a step, as the lessons of data parallelism do."""
    parts = list(zip(*(part.chunk(microbatches) for part in batch), strict=True))
    for i, (x, y) in enumerate(parts):
        model.require_backward_grad_sync = i == len(parts) - 1
        (loss(model, x, y) / microbatches).backward()
    model.finish_gradient_sync()


def mean_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of each trained parameter. Unused parameters have zeros, which torch leaves out."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


def one_process(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Return the gradients that one process gets from the loss over the global batch, and leave them there.

    An unused parameter has zeros, as in every wrapper: so weight decay moves it, too.
    """
    module.zero_grad()
    loss(module).backward()
    found = mean_gradients(module)
    for name, gradient in found.items():
        module.get_parameter(name).grad = gradient.clone()
    return found


def in_pairs(cluster: Cluster) -> tuple[dist.ProcessGroup, int, int]:
    """Form groups of ranks 0 and 2, and 1 and 3. Return the own group, its number, and the rank in it."""
    group = own_group([[0, 2], [1, 3]])
    return group, cluster.rank % 2, cluster.rank // 2


def compare_with_one_process(
    cluster: Cluster,
    wrapper: Wrapper,
    task: Task,
    microbatches: Sequence[int] = (1, 2, 3),
    optimizer: str = "sgd",
    clip: float | None = None,
    norm_type: float = 2.0,
    make: Callable[[int], nn.Module] | None = None,
    **options: Any,
) -> Trained:
    """Compare a step for each number of microbatches; each rank begins with weights of its own.

    `make` makes this rank's model, if it differs.
    """
    what = f"{wrapper}, {optimizer}, {cluster.world_size} ranks"
    batch, reference = task.batch(cluster.world_size), task.make(0)
    own_batch = batch if wrapper.takes_full_batch else mine(cluster, batch)
    ours = Trained(wrapper, (make or task.make)(cluster.rank), optimizer, **options)
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    theirs = optimizer_class(reference.parameters(), **defaults)
    assert_same(ours.state(), reference.state_dict(), 0, f"initial parameter, {what},")
    for step, count in enumerate(microbatches):
        losses = []

        def loss_of_all(model: nn.Module, losses: list = losses) -> Tensor:
            losses.append(task.loss(model, *batch))
            return losses[0]

        expected = one_process(reference, loss_of_all)
        if wrapper.is_optimizer:
            ours.optimizer.zero_grad()
        else:
            ours.optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = ours.accumulate(task.loss, own_batch, count)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), clip, norm_type)
            found = {"norm": ours.syncing.clip_grad_norm_(clip, norm_type)}
            assert_same(found, {"norm": norm}, what=f"norm {norm_type}, {what},")
            expected = mean_gradients(reference)
        for parameter in reference.parameters():
            if wrapper.by_torch and parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None  # torch's DDP leaves out what no rank has used
        theirs.step()
        change = ours.step()
        if optimizer == "sgd":
            found = {parameter: change[parameter] for parameter in expected}
            assert_same(found, expected, what=f"gradient, {what}, step {step},")
        assert_same(ours.state(), reference.state_dict(), what=f"parameter, {what}, step {step},")
        # Last, because on a GPU the next step would wait for it, and so for all that was sent before.
        all_reduce(loss, op="mean", group=options.get("group"))
        assert_same({"loss": loss}, {"loss": losses[0].detach()}, what=f"loss, {what}, step {step},")
    return ours
