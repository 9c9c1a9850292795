"""What a rank knows about its place in the job."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Cluster:
    """One rank's view: who it is, how many there are, where its tensors live.

    `store` is the key-value store that all ranks share; it outlives the rendezvous, so equipment can
    compare digests or align clocks through it. Prefix your keys with the name of your module.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: dist.Store

    @property
    def is_main(self) -> bool:
        """True on rank 0, the one that prints and writes files."""
        return self.rank == 0
