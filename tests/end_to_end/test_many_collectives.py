"""Thousands of collectives of any kind in a row are all right, and leave the streams in step."""

import random

import pytest

from comm.wire.transport import CAN_POLL, use_transport
from tests.comm.collective_cases import OURS, REDUCING, REDUCTIONS, Case, run_case
from tests.on_ranks import on_ranks

NUMELS = (0, 1, 2, 5, 40, 9000)


@pytest.mark.skipif(not CAN_POLL, reason="the transports poll sockets")
@pytest.mark.parametrize(("transport", "count"), [("auto", 10_000), ("sockets", 3_000)])
@on_ranks(3, timeout=300)
def test_thousands_of_collectives_in_a_row_are_right(cluster, transport: str, count: int):
    use_transport(transport)
    source = random.Random(5)
    for step in range(count):
        op, pattern = source.choice(OURS)
        reduction = source.choice(REDUCTIONS[1:] if op in REDUCING else REDUCTIONS)
        numel, root = source.choice(NUMELS), source.randrange(cluster.world_size)
        case = Case(op, pattern, numel, reduction=reduction, root=root, seed=step)
        run_case(case, async_op=source.random() < 0.3)
