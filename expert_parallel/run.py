"""Save and load the full state of a model with experts, until training/checkpoint.py does it."""

from typing import Any

import torch
from torch import nn

import training.run
from expert_parallel.full_state import full_optimizer_state, load_optimizer_state
from training.full_state_checkpoint import FullState


class Run(training.run.Run):
    """One rank's side of an expert-parallel run."""

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> FullState:
        def get() -> dict[str, Any]:
            optimizer_state = full_optimizer_state(model.module, optimizer, model.groups)
            return {"model": model.full_state_dict(), "optimizer": optimizer_state}

        def put(state: dict[str, Any]) -> None:
            model.load_full_state_dict(state["model"])
            load_optimizer_state(model.module, optimizer, state["optimizer"])

        return FullState(get, put)
