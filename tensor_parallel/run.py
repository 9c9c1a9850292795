"""Save and load the full state of a tensor-parallel model, until training/checkpoint.py does it."""

from typing import Any

import torch
from torch import nn

import training.run
from training.full_state_checkpoint import FullState


class Run(training.run.Run):
    """One rank's side of a tensor-parallel run."""

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> FullState:
        names = [name for name, _ in model.module.named_parameters()]

        def full(each: dict[int, dict[str, Any]], change: Any) -> dict[int, dict[str, Any]]:
            return {
                i: {key: change(names[i], value) if value.dim() else value for key, value in one.items()}
                for i, one in each.items()
            }

        def get() -> dict[str, Any]:
            state = optimizer.state_dict()
            whole = state | {"state": full(state["state"], model.full_tensor)}
            return {"model": model.full_state_dict(), "optimizer": whole}

        def put(state: dict[str, Any]) -> None:
            model.load_full_state_dict(state["model"])
            optimizer.load_state_dict(
                state["optimizer"] | {"state": full(state["optimizer"]["state"], model.shard_of)}
            )

        return FullState(get, put)

    def _made_with(self) -> dict[str, Any]:
        """Let any number of ranks resume, with or without sequence parallelism."""
        return super()._made_with() | {"run_mode": "tensor_parallel"}
