"""A model with tied layers crashes in its forward: the shared weight is freed with the first block."""

from collections.abc import Iterator

from torch import nn

from zero.blocks import blocks_of
from zero.train_zero3 import FullyShardedDataParallel

TARGET = "zero.train_zero3.FullyShardedDataParallel"
KILLER = "tests.zero.test_zero_mutant_killers.test_a_layer_shared_by_blocks_is_gathered_in_each_of_them"
CAUSE = "what several blocks share"


class Rest:
    """Wraps a block and leaves out the parameters that an earlier block has, too."""

    def __init__(self, block: nn.Module, taken: set[nn.Parameter]) -> None:
        self._block = block
        self._own = [parameter for parameter in block.parameters() if parameter not in taken]
        taken.update(self._own)

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self._own)

    def __getattr__(self, name: str):
        return getattr(self._block, name)


class mutant(FullyShardedDataParallel):
    def __init__(self, module: nn.Module, *args, **options) -> None:
        taken: set[nn.Parameter] = set()
        super().__init__(module, *args, **options, blocks=[Rest(block, taken) for block in blocks_of(module)])
