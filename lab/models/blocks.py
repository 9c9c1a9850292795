"""Find the blocks of a model, such as a transformer's layers, and compute them again in the backward."""

from functools import partial

from torch import nn
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
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
