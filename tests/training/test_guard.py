"""The guard refuses in one sentence what would train wrongly without an error, and nothing else."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.launch.errors import WorkbookError
from training.guard import Guard, refuse_unless_elementwise


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layers[0].bias.requires_grad_(False)
    return layers


def watched(module: nn.Module) -> Guard:
    guard = Guard(module)

    def on_gradient(parameter: Tensor) -> None:
        assert guard.note_arrival(parameter)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(on_gradient)
    return guard


def backward(module: nn.Module) -> None:
    module(torch.ones(1, 3)).sum().backward()


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
    layers = model()
    guard = Guard(layers)
    guard.before_forward()
    change(layers)
    with torch.no_grad():
        guard.before_forward()  # an evaluation trains nothing
    with pytest.raises(WorkbookError, match=f"^The parameter {name} was added, .* first, then wrap it"):
        guard.before_forward()


def test_a_second_backward_is_refused_until_the_first_one_is_finished() -> None:
    layers = model()
    guard = watched(layers)
    with guard.no_sync():
        backward(layers)
        backward(layers)
    with pytest.raises(WorkbookError, match=r"Call finish_gradient_sync"):
        guard.before_step()  # the gradients are those of this rank
    backward(layers)
    with pytest.raises(WorkbookError, match=r"Call finish_gradient_sync\(\) after the last backward"):
        guard.before_step()
    for mark in (guard.no_sync, torch.enable_grad):
        with (
            mark(),
            pytest.raises(WorkbookError, match=r"Another backward began before finish_gradient_sync"),
        ):
            backward(layers)
    guard.expect_gradients()
    guard.before_step()
    backward(layers)


def test_a_step_after_a_parameter_was_unfrozen_is_refused_where_no_forward_runs_through_the_wrapper() -> None:
    layers = model()
    frozen = next(layers.parameters()).requires_grad_(False)
    guard = watched(layers)
    guard.before_step()
    frozen.requires_grad_(True)
    with pytest.raises(WorkbookError, match=r"weight was added, .* after wrapping"):
        guard.before_step()


def test_sparse_gradients_are_refused_at_wrapping_and_in_the_backward() -> None:
    with pytest.raises(WorkbookError, match="1 has sparse gradients"):
        Guard(nn.Sequential(nn.Linear(1, 1), nn.Embedding(5, 2, sparse=True)))
    Guard(nn.Embedding(5, 2, sparse=True).requires_grad_(False))
    table = nn.Embedding(5, 2)
    watched(table)
    with pytest.raises(WorkbookError, match=r"A parameter of shape \(5, 2\) has sparse gradients"):
        F.embedding(torch.tensor([1]), table.weight, sparse=True).sum().backward()


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
