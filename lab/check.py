"""Compare gradients and parameters with a single-process reference.

The loss alone proves nothing: with a wrong gradient scale Adam trains almost as well.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lab.launch.errors import WorkbookError

Tensors = Mapping[str, Tensor | None]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a copy of every parameter's gradient by name, or None without one. Tied weights appear once."""
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {
        name: None if grad is None else grad.detach().as_subclass(Tensor).clone()
        for name, grad in grads.items()
    }


def parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a copy of every parameter by name. Tied weights appear once."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def reference_gradients(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict:
    """Return the gradients that one process gets from the loss over the global batch."""
    module.zero_grad(set_to_none=True)
    loss_of(module).backward()
    return gradients(module)


def assert_same(actual: Tensors, expected: Tensors, rtol: float = 1e-9, what: str = "gradient") -> None:
    """Raise AssertionError, naming every tensor that differs, unless all agree.

    No element may differ by more than `rtol` times the largest expected element of its tensor. A gradient
    that is zero except for rounding (the bias of the keys in attention) is compared relative to a millionth
    of the largest element of all tensors. A constant factor is named: the world size shows a sum, not a mean.
    """
    floor = 1e-6 * max((_largest(t) for t in expected.values() if t is not None), default=0.0)
    complaints = [f"{name}: only one side has it" for name in sorted(actual.keys() ^ expected.keys())]
    for name in sorted(actual.keys() & expected.keys()):
        complaint = _difference(actual[name], expected[name], rtol, floor)
        if complaint:
            complaints.append(f"{name}: {complaint}")
    if complaints:
        raise AssertionError(f"{len(complaints)} {what}(s) differ:\n  " + "\n  ".join(complaints))


def _difference(actual: Tensor | None, expected: Tensor | None, rtol: float, floor: float) -> str:
    if actual is None or expected is None:
        if actual is expected:
            return ""
        return f"there is {'none, but one' if actual is None else 'one, but none'} is expected"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    a, e = (_real(each.as_subclass(Tensor)).double().cpu() for each in (actual, expected))
    if torch.equal(a, e):
        return ""
    scale = max(_largest(e), floor)
    worst = _largest(a - e)
    if worst <= rtol * scale:
        return ""
    factor = (a * e).sum().item() / max((e * e).sum().item(), 1e-300)
    if abs(factor - 1) > 1e-3 and _largest(a - factor * e) <= max(rtol, 1e-6) * abs(factor) * scale:
        return f"{factor:.6g} times what it should be"
    return f"off by {worst:.3g}, where the largest element is {_largest(e):.3g}"


def _real(tensor: Tensor) -> Tensor:
    """Return the tensor, or the real and the imaginary parts of a complex one."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _largest(tensor: Tensor) -> float:
    return tensor.as_subclass(Tensor).abs().max().item() if tensor.numel() else 0.0


def module_digest(module: nn.Module) -> str:
    """Return the SHA-256 of the names and the bytes of all parameters and buffers."""
    return state_digest(dict([*module.named_parameters(), *module.named_buffers()]))


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names and the bytes of all tensors."""
    sha = hashlib.sha256()
    for name, tensor in state.items():
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def refuse_unequal(digests: list[str]) -> None:
    """Raise WorkbookError, with the same text on all ranks, unless all replicas have rank 0's digest."""
    odd = [str(rank) for rank, one in enumerate(digests) if one != digests[0]]
    if odd:
        raise WorkbookError(
            f"the replicas are not equal after the last step (rank {', '.join(odd)} differs from rank 0), "
            "so they have not trained as one model: look for a gradient that is not synchronised"
        )
