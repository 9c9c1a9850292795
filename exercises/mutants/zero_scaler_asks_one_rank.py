"""With fp16 and a GradScaler the ranks' scales drift apart: each looks for inf in its own shard only."""

from typing import Any

from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

TARGET = "data_parallel.grad_scaler.found_inf"
KILLER = (
    "tests.data_parallel.test_sharded_optimizer."
    "test_a_grad_scaler_skips_the_step_on_all_ranks_when_one_has_inf"
)
FAILS_WITH = "all_gather"  # the ranks that step wait for the one that does not


def mutant(scaler: GradScaler, optimizer: Any, group: Any, pattern: str | None) -> bool:
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    return any(bool(flag) for flag in scaler._found_inf_per_device(optimizer).values())
