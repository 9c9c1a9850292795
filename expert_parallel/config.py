"""Say how many experts there are, which ranks share them, and which ranks hold the same ones.

      4 ranks, 8 experts, --expert-ranks 2

                       experts 0..3    experts 4..7
      expert group 0   rank 0          rank 1
      expert group 1   rank 2          rank 3

The ranks of an expert group exchange tokens. The ranks of a column are replicas: they hold the same experts
and average the gradients of these. An expert group has consecutive ranks, because launchers give such numbers
to the ranks of one machine, and tokens are sent in every layer.
"""

import math
import random
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from comm.collectives import Group, use_pattern
from comm.wire.groups import own_group
from lab.launch.errors import WorkbookError
from lab.models.model import FeedForward, GPTConfig, seeded


@dataclass(frozen=True)
class MoEConfig:
    """Hold the sizes of a mixture of experts."""

    num_experts: int = 8
    top_k: int = 2
    """How many experts a token passes."""
    capacity: float | None = None
    """A rank sends an expert at most this number times the mean, tokens * top_k / num_experts, rounded up."""
    shared: bool = False
    """Whether all tokens pass one more expert, which every rank holds."""


def refuse_choice(moe: MoEConfig) -> None:
    """Refuse experts and tokens that make no sense."""
    if moe.num_experts < 1:
        raise WorkbookError(f"--experts {moe.num_experts}: there must be at least one.")
    if not 1 <= moe.top_k <= moe.num_experts:
        raise WorkbookError(
            f"--top-k {moe.top_k}: a token passes at least 1 and at most all {moe.num_experts} experts."
        )
    if moe.capacity is not None and not 0 < moe.capacity < math.inf:
        raise WorkbookError(
            f"--capacity {moe.capacity:g}: it is a number above 0, such as 1.25; leave it out to drop none."
        )


def validate_experts(moe: MoEConfig, expert_ranks: int, ranks: int) -> None:
    """Refuse experts that cannot be divided as asked, and tokens that cannot be dispatched as asked."""
    refuse_choice(moe)
    if expert_ranks < 1 or ranks % expert_ranks:
        raise WorkbookError(
            f"--expert-ranks {expert_ranks} must divide the {ranks} ranks; leave it out for as many as fit."
        )
    if moe.num_experts % expert_ranks:
        more = (moe.num_experts // expert_ranks + 1) * expert_ranks
        raise WorkbookError(
            f"--experts {moe.num_experts}: {expert_ranks} ranks cannot share them equally; choose a multiple "
            f"of {expert_ranks}, such as --experts {more}."
        )


def random_numbers_of(seed: int, layer: int, part: int | str) -> AbstractContextManager[None]:
    """Draw random numbers that depend on the arguments alone, so every rank can make the same weights."""
    return seeded(random.Random(f"{seed} {layer} {part}").getrandbits(63))


def make_expert(config: GPTConfig, seed: int, layer: int, expert: int | str) -> FeedForward:
    """Return an expert with the initialisation of lab.models.model.GPT."""
    with random_numbers_of(seed, layer, expert):
        made = FeedForward(config)
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                is_last = name.startswith("down_proj")
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5 if is_last else 0.02)
    return made


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


def form_groups(expert_ranks: int, pattern: str | None = None) -> ExpertGroups:
    """Form the groups of a job in which `expert_ranks` ranks share the experts; all ranks must call it.

    `pattern` is that of the collectives in the new groups (comm/collectives.py).
    """
    ranks = list(range(dist.get_world_size()))
    sharing = [ranks[first : first + expert_ranks] for first in ranks[::expert_ranks]]
    same = [ranks[place::expert_ranks] for place in range(expert_ranks)]
    experts, replicas = own_group(sharing), own_group(same)
    for group in (experts, replicas):
        use_pattern(pattern, group)
    return ExpertGroups(None, experts, replicas)
