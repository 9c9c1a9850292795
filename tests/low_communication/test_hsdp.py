"""Test which ranks hybrid sharding takes for a machine, and what it sends where.

tests/test_wrappers.py compares it, as all wrappers, with one process.
"""

import os

import torch
import torch.distributed as dist

from comm.wire.hosts import VARIABLE
from lab.cluster import Cluster
from lab.trace.ledger import LEDGER
from low_communication.train_hsdp import HybridShardedDataParallel, machine_groups
from tests.equivalence import compare_with_one_process
from tests.on_ranks import on_ranks
from tests.tasks import BRANCHES, Blocks
from tests.wrappers import named


def named_hosts(cluster: Cluster, names: str) -> None:
    """Let each rank have the host with its letter."""
    os.environ[VARIABLE] = names[cluster.rank]


@on_ranks(6, timeout=60)
def test_parameters_and_their_gathers_stay_on_a_machine(cluster: Cluster):
    # Six ranks are on two machines, and neighbours are on different ones.
    named_hosts(cluster, "ababab")
    shards, replicas = machine_groups(cluster, None)
    assert dist.get_process_group_ranks(shards) == [[0, 2, 4], [1, 3, 5]][cluster.rank % 2]
    # The ranks with the same shard are one on each machine.
    assert dist.get_process_group_ranks(replicas) == [[0, 1], [2, 3], [4, 5]][cluster.rank // 2]

    # Three equal blocks, which six ranks divide without padding. There is no root.
    module, P = Blocks(12), 3 * 12 * 12 * 4
    model = HybridShardedDataParallel(module, shards, replicas)
    x = torch.ones(2, 12)
    LEDGER.clear()
    model.require_backward_grad_sync = False
    for _ in range(2):
        model(x).sum().backward()
    # The next forward waits for the last reduce-scatter.
    model.require_backward_grad_sync = True
    model.end_backward()
    # Each microbatch gathers three blocks, and two of them again, and reduce-scatters three.
    each = 8 * (P // 3) * 2 // 3
    assert bytes_by_axis() == {"shards": 2 * each}
    model(x).sum().backward()
    model.finish_gradient_sync()
    # Between the two machines, a rank all-reduces its third of the gradients once: 2 (k-1)/k P/m.
    assert bytes_by_axis() == {"shards": 3 * each, "replicas": P // 3}

    compare_with_one_process(cluster, named("hsdp"), BRANCHES, (3, 1), "momentum")


def bytes_by_axis() -> dict[str, int]:
    """Return the bytes that this rank has sent along each axis, without headers."""
    sent: dict[str, int] = {}
    for entry, traffic in LEDGER.rows().items():
        if entry.pattern != "header":
            sent[entry.axis] = sent.get(entry.axis, 0) + traffic.bytes_sent
    return sent
