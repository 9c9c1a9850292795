"""torch.amp.GradScaler beside an optimizer of shards: an inf on one rank is an inf for all.

      rank 0    its shard is finite   ──┐                ┌── skips the step, halves the scale
      rank 1    its shard holds inf   ──┴─ all-reduce ───┴── skips the step, halves the scale

A scaler looks at the gradients that its rank has: with a shard each, one rank would skip the step that
another takes. It passes itself to an optimizer that asks for it, and so the ranks can tell each other. (torch
warns that this will change one day.) As torch.distributed.fsdp.sharded_grad_scaler does for FSDP.
"""

from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from comm.collectives import Group, all_reduce


def found_inf(scaler: GradScaler, optimizer: Optimizer, group: Group, pattern: str | None) -> bool:
    """Whether any rank's gradients hold inf or nan; then every rank's scaler knows. All ranks call it."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    found = list(scaler._found_inf_per_device(optimizer).values())  # what scaler.update() will look at
    for flag in found:
        all_reduce(flag, op="max", group=group, pattern=pattern)
    return any(bool(flag) for flag in found)
