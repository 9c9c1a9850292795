"""The bytes that each axis of a mesh sends: as the ledger counts them, and by formula."""

import torch

from comm.collectives import all_reduce
from comm.point_to_point import recv, send
from hybrid_parallel.mesh import AXES, Mesh
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.ledger import LEDGER
from lab.ranks import run_ranks


def test_each_message_counts_for_the_axis_along_which_it_travels():
    def counted(cluster: Cluster) -> None:
        for pattern in ("cma", "pipelined_ring", "tree", "torch"):
            all_reduce(torch.ones(3), pattern=pattern)  # connects all ranks, before the group gets a name
        square, line = (
            Mesh(cluster, ParallelSizes(pipeline=2, tensor=2)),
            Mesh(cluster, ParallelSizes(data=4)),
        )
        for axis in AXES:
            group = (line if axis == "data" else square).group(axis)
            for pattern in ("cma", "pipelined_ring", "tree", "torch"):
                LEDGER.clear()
                all_reduce(torch.ones(3), group=group, pattern=pattern)
                assert {entry.axis for entry in LEDGER.rows()} == {axis}, (axis, pattern)
        LEDGER.clear()
        send(torch.ones(1), 1, square.pipeline) if cluster.rank < 2 else recv(
            torch.ones(1), 0, square.pipeline
        )
        assert {entry.axis for entry in LEDGER.rows()} <= {"pipeline"}

    run_ranks(counted, 4)
