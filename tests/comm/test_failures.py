"""If a peer dies or sleeps, the others name it in a sentence, and no rank hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import CommError
from comm.transport.choice import use_transport
from lab.ranks import RankError, run_ranks
from lab.replace import replaced
from tests.comm.transports import over


def die(*args, **kwargs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def outcomes(fn, world_size: int, **options) -> list:
    """Return each rank's result or the text of its error. Timeouts are long: no error may need them."""
    results = run_ranks(fn, world_size, collect_failures=True, **{"group_timeout": 40, **options})
    return [str(result) if isinstance(result, RankError) else result for result in results]


def sentence(text: str) -> str:
    """Return the CommError at the end of a traceback."""
    return text.rsplit("comm.errors.CommError: ", 1)[-1]


@pytest.mark.parametrize("transport", ["auto", "sockets", "gloo"])
@pytest.mark.parametrize("pattern", ["pipelined_ring", "tree", "halving_doubling", "torch"])
def test_a_rank_that_dies_before_an_all_reduce_is_named_by_those_who_meet_it(pattern: str, transport: str):
    def one_dies(cluster) -> None:
        use_transport(transport)
        collectives.barrier()
        collectives.barrier(pattern="torch")
        if cluster.rank == 2:
            die()
        collectives.all_reduce(torch.ones(10), pattern=pattern)

    texts = [sentence(text) for text in outcomes(one_dies, 4)]
    assert texts[2] == "rank 2 was killed by SIGKILL before it returned."
    for rank in (0, 1, 3):
        assert texts[rank].startswith(f"all_reduce ({pattern}): rank {rank} ")
        assert "has died or left, so look for the first error in its log" in texts[rank]
    if pattern != "torch":
        assert any("rank 2" in texts[rank] for rank in (0, 1, 3))


@pytest.mark.parametrize("transport", ["auto", "sockets", "tcp", "gloo"])
def test_a_rank_that_dies_in_the_middle_of_an_all_reduce_is_named(transport: str):
    pattern = "pipelined_ring"

    def one_dies(cluster) -> None:
        collectives.barrier()
        x = torch.ones(1_000_000)
        if cluster.rank == 2:
            with replaced("comm.algorithms.reduction.combine", die):  # its first piece has just arrived
                collectives.all_reduce(x, pattern=pattern)
        collectives.all_reduce(x, pattern=pattern)

    texts = outcomes(lambda cluster: over(transport, cluster, one_dies), 4)
    texts = [sentence(text) for text in texts]
    assert texts[2] == "rank 2 was killed by SIGKILL before it returned."
    for rank in (0, 1, 3):
        assert texts[rank].startswith(f"all_reduce ({pattern}): rank {rank} could not ")
        assert "has died or left, so look for the first error in its log" in texts[rank]
    assert any("rank 2" in texts[rank] for rank in (0, 1, 3))


def test_an_asynchronous_operation_names_a_dead_peer_in_wait():
    def one_dies(cluster) -> str:
        collectives.barrier()
        handle = collectives.broadcast(torch.ones(10), async_op=True) if cluster.rank == 0 else die()
        with pytest.raises(CommError) as error:
            handle.wait()
        return str(error.value)

    assert "broadcast (tree): rank 0 could not" in outcomes(one_dies, 2)[0]


def test_errors_name_ranks_of_the_job_in_a_smaller_group_too():
    def one_dies(cluster) -> str:
        group = dist.new_group([1, 3])
        collectives.barrier()
        if cluster.rank == 3:
            die()
        if cluster.rank == 1:
            with pytest.raises(CommError) as error:
                collectives.all_reduce(torch.ones(10), group=group)
            return str(error.value)
        return ""

    assert "rank 1 could not" in (text := outcomes(one_dies, 4)[1])
    assert "rank 3 has died or left" in text
