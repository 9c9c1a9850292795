"""Find the blocks of a model, such as a transformer's layers, and compute them again in the backward."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the members, with parameters, of the outermost lists. A list in a list has no forward itself."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return [block for child in module.children() for block in blocks_of(child)]
    members = [blocks_of(member) if isinstance(member, nn.ModuleList) else [member] for member in module]
    return [block for some in members for block in some if any(True for _ in block.parameters())]


def recompute_blocks(module: nn.Module) -> None:
    """Keep only the inputs of the blocks in module lists; the backward computes what is in them again."""
    for block in blocks_of(module):
        again = partial(same_buffers, block)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=again)


def same_buffers(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a forward of the module and for its recomputation: checkpoint's `context_fn`.

    The recomputation finds the buffers as the forward found them, and its changes are lost. Else BatchNorm
    would count a batch twice, and what depends on a buffer would be computed with a later one.
    """
    changed: list[tuple[nn.Module, str, Tensor]] = []  # a buffer's module and name, and what it was before

    @contextmanager
    def forward() -> Iterator[None]:
        buffers = [(part, *named) for part in module.modules() for named in part.named_buffers(recurse=False)]
        before = {buffer: buffer.detach().clone() for *_, buffer in buffers if not buffer.is_meta}
        yield
        for part, name, buffer in buffers:
            now = getattr(part, name)
            if buffer in before and (now is not buffer or not torch.equal(now, before[buffer])):
                changed.append((part, name, before[buffer]))

    @contextmanager
    def recomputation() -> Iterator[None]:
        now = [(part, name, getattr(part, name)) for part, name, _ in changed]
        copies = {old: old.clone() for *_, old in changed}  # a tensor may have two names
        for part, name, old in changed:
            setattr(part, name, copies[old])
        try:
            yield
        finally:
            for part, name, buffer in now:
                setattr(part, name, buffer)

    return forward(), recomputation()
