"""Say which ranks share the experts, and which ranks hold the same ones.

      4 ranks, 8 experts, --expert-ranks 2

                       experts 0..3    experts 4..7
      expert group 0   rank 0          rank 1
      expert group 1   rank 2          rank 3

The ranks of an expert group exchange tokens. The ranks of a column are replicas: they hold the same experts
and average the gradients of these. An expert group has consecutive ranks, because launchers give such numbers
to the ranks of one machine, and tokens are sent in every layer.
"""

from dataclasses import dataclass

import torch.distributed as dist

from comm.collectives import Group
from lab.launch.gloo_threads import keep_from_preempting


@dataclass(frozen=True)
class ExpertGroups:
    """Hold the groups that this rank belongs to."""

    everyone: Group
    """All ranks that share a batch, an expert group after the other."""
    experts: Group
    """The ranks among which the experts are divided; they have consecutive places in `everyone`."""
    replicas: Group
    """The ranks that hold the same experts."""

    @property
    def num_expert_ranks(self) -> int:
        return dist.get_world_size(self.experts)

    @property
    def rank(self) -> int:
        """This rank's place in its expert group."""
        return dist.get_rank(self.experts)

    @property
    def place(self) -> int:
        """This rank's place in `everyone`."""
        return dist.get_rank(self.everyone)

    @property
    def members(self) -> slice:
        """The places of this expert group's ranks in `everyone`."""
        first = self.place - self.rank
        return slice(first, first + self.num_expert_ranks)

    def own_experts(self, num_experts: int) -> range:
        """Return the numbers of the experts that this rank holds."""
        each = num_experts // self.num_expert_ranks
        return range(self.rank * each, (self.rank + 1) * each)


def form_groups(expert_ranks: int) -> ExpertGroups:
    """Form the groups of a job in which `expert_ranks` ranks share the experts; all ranks must call it."""
    ranks = list(range(dist.get_world_size()))
    sharing = [ranks[first : first + expert_ranks] for first in ranks[::expert_ranks]]
    same = [ranks[place::expert_ranks] for place in range(expert_ranks)]
    experts, replicas = (dist.new_subgroups_by_enumeration(groups)[0] for groups in (sharing, same))
    keep_from_preempting()  # each group has threads of its own
    return ExpertGroups(None, experts, replicas)
