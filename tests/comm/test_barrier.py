"""A barrier holds back every rank until all have arrived."""

import pytest

from comm import collectives
from lab.ranks import run_ranks


@pytest.mark.parametrize("pattern", ["tree", "torch"])
def test_no_rank_leaves_a_barrier_before_all_have_arrived(pattern: str):
    def meet(cluster) -> None:
        for late in range(cluster.world_size):
            if cluster.rank == late:
                # a rank that slipped through would be here long before
                cluster.store.wait([f"{p} is at {late}" for p in range(cluster.world_size) if p != late])
                assert cluster.store.add(f"through {late}", 0) == 0
            else:
                cluster.store.set(f"{cluster.rank} is at {late}", "")
            cluster.store.add(f"came {late}", 1)
            collectives.barrier(pattern=pattern)
            assert cluster.store.add(f"came {late}", 0) == cluster.world_size
            cluster.store.add(f"through {late}", 1)

    run_ranks(meet, 3)
