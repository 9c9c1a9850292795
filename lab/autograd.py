"""Ask autograd for what torch has no public names for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable


def is_in_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Call the function when the backward that runs in this thread has ended."""
    Variable._execution_engine.queue_callback(function)


def hooks_of(tensor: Tensor) -> list[Callable[..., Any]]:
    """Return the hooks that wait for the tensor's gradient."""
    of_tensor: Any = tensor
    some = of_tensor._backward_hooks, of_tensor._post_accumulate_grad_hooks
    return [hook for hooks in some for hook in (hooks or {}).values()]
