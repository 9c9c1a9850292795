"""Tell a wrapper that keeps copies of the parameters, or of what was made of them, that others are loaded.

A copy would stay as it was: DiLoCo's anchor, from which it computes the ranks' change; or what a compressor
has not sent of the gradients before. A wrapper with `restart()` begins again. One whose
`takes_loads` is False refuses to load: it cannot know whether the ranks are in the middle of a round.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lab.launch.errors import WorkbookError

_keepers = weakref.WeakSet[Any]()


def watch_loads(wrapper: Any, module: nn.Module) -> None:
    """Let the wrapper know when any part of its module is loaded."""
    if not hasattr(wrapper, "restart") and getattr(wrapper, "takes_loads", True):
        return
    _keepers.add(wrapper)
    keeper = weakref.ref(wrapper)
    for part in module.modules():
        part.register_load_state_dict_pre_hook(lambda *_: _before_load(keeper()))


def before_loading(tensors: Iterable[Tensor]) -> None:
    """Do the same where not `load_state_dict` fills these parameters, but a checkpoint."""
    filled = {id(tensor) for tensor in tensors}
    for wrapper in list(_keepers):
        if not filled.isdisjoint(map(id, wrapper.parameters())):
            _before_load(wrapper)


def _before_load(wrapper: Any) -> None:
    if wrapper is None:  # its module has outlived it
        return
    if not getattr(wrapper, "takes_loads", True):
        raise WorkbookError(
            f"{type(wrapper).__name__} keeps the parameters of the last round, and would go on from those: "
            "load others first, and then wrap the module."
        )
    wrapper.restart()
