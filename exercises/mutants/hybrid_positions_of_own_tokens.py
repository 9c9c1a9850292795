"""Every rank looks up positions 0, 1, ... for its tokens: a pre-hook that returns nothing changes nothing."""

from typing import Any

from torch import Tensor, nn

from hybrid_parallel.context_axis import ContextAxis

TARGET = "hybrid_parallel.context_axis.ContextAxis._at_own_positions"
KILLER = (
    "tests.hybrid_parallel.test_context_and_experts."
    "test_cut_sequences_beside_divided_layers_equal_one_process"
)
CAUSE = "its own position in the full sequence"
SYMPTOM = "With a context axis the loss is not that of one process, from the first step on."


def mutant(self: ContextAxis, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
    [positions_t] = args
    args = (self._positions.to(positions_t.device)[positions_t],)
