"""Save a pipeline's checkpoint by the names of the full model, until one checkpoint serves all lessons."""

from typing import Any

import torch
from torch import nn

import training.run
from comm.exchange import exchange
from training.full_state_checkpoint import FullState


class Run(training.run.Run):
    """Runs one rank's side of a training, whose checkpoint fits any schedule on any number of ranks."""

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> FullState:
        own = model.named_own_parameters()  # type: ignore[operator]

        def get() -> dict[str, Any]:
            mine = {name: optimizer.state[p] for name, p in own.items() if p in optimizer.state}
            by_name: dict[str, Any] = {}
            for of_rank in exchange(mine):
                by_name |= of_rank
            return {"model": model.full_state_dict(), "optimizer": by_name}  # type: ignore[operator]

        def put(state: dict[str, Any]) -> None:
            model.load_full_state_dict(state["model"])  # type: ignore[operator]
            names = {parameter: name for name, parameter in own.items()}
            order = [names.get(p) for group in optimizer.param_groups for p in group["params"]]
            by_name = state["optimizer"]
            known = {i: by_name[name] for i, name in enumerate(order) if name in by_name}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": known})

        return FullState(get, put)

    def _made_with(self) -> dict[str, Any]:
        return super()._made_with() | {"run_mode": "pipeline", "layers": self._args.layers}  # type: ignore[attr-defined]
