"""Notice when another parameter takes the place of one that an optimizer trains.

An optimizer knows parameters, but not the modules that hold them. So it cannot tell a parameter that was
replaced from one that is unused. But torch calls a hook for each parameter and each module that is put into
a module.
"""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Replacements:
    """Watches the attributes of modules that held a parameter of an optimizer."""

    def __init__(self) -> None:
        self._known: set[Tensor] = set()
        self._places: dict[tuple[weakref.ref[nn.Module], str], None] = {}  # in order, each once
        _watching.add(self)

    def know(self, parameter: Tensor) -> None:
        """Watch one more parameter."""
        self._known.add(parameter)

    def find(self) -> str | None:
        """Return the name of an attribute with a parameter that no sharded optimizer has, or None."""
        if not self._places:
            return None
        known = {parameter for one in _watching for parameter in one._known}
        for place, name in self._places:
            if (module := place()) is not None:
                held = module._parameters if name in module._parameters else module._modules
                if any(p.requires_grad and p not in known for p in _parameters(held.get(name))):
                    return f"{name} of a {type(module).__name__}"
        return None

    def note(self, module: nn.Module, name: str, before: Tensor | nn.Module | None) -> None:
        """Remember that the attribute `name` of `module`, which held `before`, gets another value."""
        if any(parameter in self._known for parameter in _parameters(before)):
            self._places[weakref.ref(module), name] = None


def _parameters(held: Tensor | nn.Module | None) -> Iterator[Tensor]:
    if isinstance(held, nn.Module):
        yield from held.parameters()
    elif held is not None:
        yield held


_watching: "weakref.WeakSet[Replacements]" = weakref.WeakSet()


def _on_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    for one in _watching:
        one.note(module, name, module._parameters.get(name))


def _on_module(module: nn.Module, name: str, submodule: Any) -> None:
    for one in _watching:
        one.note(module, name, module._modules.get(name))


register_module_parameter_registration_hook(_on_parameter)
register_module_module_registration_hook(_on_module)
