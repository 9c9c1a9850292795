"""Describe a rank of the job."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Cluster:
    """Describe a rank of the job: its number, the world size, its device, and the store.

    `store` is a key-value store that all ranks share. Prefix your keys with the name of your module.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: dist.Store

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which prints and writes files."""
        return self.rank == 0
