"""The guard refuses in one sentence what would train wrongly without an error, and nothing else."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.launch.errors import WorkbookError
from training.elementwise import Shard, refuse_unless_elementwise
from training.guard import guarded, watch


class Wrapper(nn.Module):
    """Sends in the backward, or seems to: the guard looks at a wrapper from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, x: Tensor) -> Any:
        return self.module(x)

    def finish_gradient_sync(self) -> None:
        pass


def layers() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layers[0].bias.requires_grad_(False)
    return layers


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layers: layers.append(nn.Linear(2, 2)), "2.weight"),
        (lambda layers: layers.pop(1), "1.weight"),
        (lambda layers: setattr(layers[1], "bias", nn.Parameter(torch.zeros(2))), "1.bias"),
        (lambda layers: layers[1].weight.requires_grad_(False), "1.weight"),
        (lambda layers: layers[0].bias.requires_grad_(True), "0.bias"),
        (lambda layers: layers[0].double(), "0.weight"),
    ],
)
def test_a_parameter_that_changed_after_wrapping_is_named(
    change: Callable[[nn.Sequential], object], name: str
) -> None:
    model = watch(Wrapper(layers()))
    model(torch.ones(1, 3))
    change(model.module)
    x = torch.ones(1, 3, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        model.module[0](x)  # an evaluation trains nothing
    with pytest.raises(WorkbookError, match=f"^The parameter {name} was added, .* first, then wrap it"):
        model(x)


def test_sparse_gradients_are_refused_at_wrapping_and_in_the_backward() -> None:
    with pytest.raises(WorkbookError, match="1 has sparse gradients"):
        watch(Wrapper(nn.Sequential(nn.Linear(1, 1), nn.Embedding(5, 2, sparse=True))))
    watch(Wrapper(nn.Embedding(5, 2, sparse=True).requires_grad_(False)))
    table = watch(Wrapper(nn.Embedding(5, 2))).module
    with pytest.raises(WorkbookError, match=r"A parameter of shape \(5, 2\) has sparse gradients"):
        F.embedding(torch.tensor([1]), table.weight, sparse=True).sum().backward()


def test_an_object_of_a_guarded_class_is_watched_from_the_end_of_its_constructor_on() -> None:
    watched = guarded(type("Guarded", (Wrapper,), {}))
    model = watched(layers())
    backward(model)
    with pytest.raises(WorkbookError, match=r"Call finish_gradient_sync"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    plain = type("Plain", (watched,), {})(layers())
    backward(plain)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()  # a subclass says for itself whether it is guarded


def test_a_guard_ends_with_its_wrapper_and_lets_the_module_be_wrapped_again() -> None:
    module = layers()
    model = watch(Wrapper(module))
    backward(model)
    ended = weakref.ref(model)
    del model
    gc.collect()
    assert ended() is None
    module.append(nn.Linear(2, 1))
    again = watch(Wrapper(module))
    backward(again)
    again.finish_gradient_sync()
    torch.optim.SGD(again.parameters(), lr=0.1).step()


class NormalisedSgd(torch.optim.SGD):
    """Divide each gradient by its norm, which a shard does not know."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        super().step()


def test_an_optimizer_that_looks_at_a_whole_tensor_is_refused() -> None:
    for accepted in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        refuse_unless_elementwise(accepted, {"lr": 0.1})
    for refused in (NormalisedSgd, torch.optim.Adafactor, torch.optim.Muon):
        with pytest.raises(WorkbookError, match=f"{refused.__name__} does not work element by element"):
            refuse_unless_elementwise(refused, {"lr": 0.1})


NUMBERS = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    "operation",
    [
        torch.var_mean,
        torch.Tensor.max,
        torch.unique,
        torch.linalg.svdvals,
        lambda shard: torch.histc(shard, 3),
        lambda shard: shard.cummax(0),
        lambda shard: shard.softmax(1),
        lambda shard: shard @ shard.T,
        lambda shard: shard.flatten().kthvalue(1),
        lambda shard: torch._foreach_max([shard]),
        lambda shard: nn.utils.get_total_norm([shard]),
        lambda shard: float(shard[0, 0]),
        lambda shard: shard.numpy().max(),
        lambda shard: max(shard.flatten().tolist()),
    ],
)
def test_what_needs_all_of_a_tensor_is_refused_for_a_shard(operation: Callable[[Tensor], object]) -> None:
    operation(NUMBERS)
    with pytest.raises(WorkbookError, match=r"would see this rank's shard only: .*as_subclass"):
        operation(NUMBERS.as_subclass(Shard))


@pytest.mark.parametrize(
    "operation",
    [
        lambda shard: 2 / (1 - shard.clamp(2, 3)) ** 2,
        lambda shard: torch.where(shard > 1, shard, -shard),
        lambda shard: shard.view(-1)[1:].double().mul_(3),
        lambda shard: torch._foreach_lerp([shard], [shard], 0.5)[0],
        lambda shard: torch.cat([shard.T.contiguous(), shard.reshape(3, 2)]).nan_to_num(),
    ],
)
def test_what_works_element_by_element_is_the_same_for_a_shard(operation: Callable[[Tensor], Tensor]) -> None:
    shard = operation(NUMBERS.as_subclass(Shard))
    assert torch.equal(shard.as_subclass(Tensor), operation(NUMBERS)) and f"{shard}"
