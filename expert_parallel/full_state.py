"""Put the state of all experts together, so that any number of ranks can divide it again.

A rank's state dict names experts by their numbers among all experts:

      rank 0   blocks.0.mlp.experts.0.up_proj.weight  ..1..  ─┐
                                                              ├─ all-gather ─►  experts 0 to 3 on each rank
      rank 1   blocks.0.mlp.experts.2.up_proj.weight  ..3..  ─┘

So to load a full state dict a rank takes what has the names that it knows, whichever ranks have saved it.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from comm.functions import InFlightAllGather
from expert_parallel.config import ExpertGroups

_EXPERT = re.compile(r"((?:.*\.)?experts\.)(\d+)(\..*)")


def full_state(own: dict[str, Tensor], groups: ExpertGroups) -> dict[str, Tensor]:
    """Return a copy of the state of all ranks of the expert group, by name. All of them must call it."""
    full: dict[str, Tensor] = {}
    experts = [found for name in own if (found := _EXPERT.fullmatch(name))]
    num_own = len({number for _, number, _ in (found.groups() for found in experts)})
    for name, tensor in own.items():
        if not (found := _EXPERT.fullmatch(name)):
            full[name] = tensor.clone()
            continue
        before, number, after = found.groups()
        every = InFlightAllGather(tensor.unsqueeze(0), 0, groups.experts).wait()
        for rank, one in enumerate(every):
            full[f"{before}{int(number) + (rank - groups.rank) * num_own}{after}"] = one.clone()
    return full


def own_state(full: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a full state that has the names of this rank's own state."""
    return {name: full[name] for name in own}


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: ExpertGroups
) -> dict[str, Any]:
    """Return the optimizer's state by the names of parameters; all ranks of an expert group must call it.

    The experts of a layer must be trained on all ranks or on none.
    """
    names = [name for name, _ in model.named_parameters()]
    saved = optimizer.state_dict()
    keys = sorted({key for one in saved["state"].values() for key in one})
    by_key = {
        key: full_state({names[i]: one[key] for i, one in saved["state"].items() if key in one}, groups)
        for key in keys
    }
    return {"state": by_key, "options": [_without_parameters(group) for group in saved["param_groups"]]}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
    """Load this rank's part of what `full_optimizer_state` has returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for number, (name, _) in enumerate(model.named_parameters()):
        one = {key: by_name[name] for key, by_name in full["state"].items() if name in by_name}
        if one:
            state[number] = one
    groups = optimizer.state_dict()["param_groups"]
    options = [{**own, **saved} for own, saved in zip(groups, full["options"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": options})


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class FullModel(nn.Module):
    """Holds a full state under its names, so that the replicas of all ranks can be compared bit for bit."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name in sorted(state):
            self.register_buffer(name.replace(".", "/"), state[name])
