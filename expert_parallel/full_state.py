"""Put the state of all experts together, so that any number of ranks can divide it again.

A rank's state dict names experts by their numbers among all experts:

      rank 0   blocks.0.mlp.experts.0.up_proj.weight  ..1..  ─┐
                                                              ├─ all-gather ─►  experts 0 to 3 on each rank
      rank 1   blocks.0.mlp.experts.2.up_proj.weight  ..3..  ─┘

So to load a full state dict a rank takes what has the names that it knows, whichever ranks have saved it.
"""

import re

from torch import Tensor

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
