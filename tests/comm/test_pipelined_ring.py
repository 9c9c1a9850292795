import torch

from comm import collectives
from comm.shards import shards_of
from lab.ranks import run_ranks


def reduce_scatter_again_and_again(cluster, numel: int) -> None:
    # A digit for each rank's contribution: a partial sum that is overwritten too early shows whose it was.
    full = (torch.arange(numel, dtype=torch.float64) + 1) * 10**cluster.rank
    expected = shards_of((torch.arange(numel, dtype=torch.float64) + 1) * 1111111, 7)[cluster.rank]
    for _ in range(60):
        shard = torch.empty_like(expected)
        collectives.reduce_scatter(shard, full)
        assert torch.equal(shard, expected), (shard, expected)


def test_partial_sums_survive_until_they_have_left_also_where_some_chunks_are_empty():
    for numel in (4, 5):
        run_ranks(reduce_scatter_again_and_again, 7, numel)


def test_an_all_reduce_right_after_another_does_not_meet_its_messages():
    def work(cluster) -> None:
        for turn in range(200):  # more than an eager tag has turns
            x = torch.full((3,), float(turn + cluster.rank))
            collectives.all_reduce(x)
            assert (x == 2 * turn + 1).all(), (turn, x)

    run_ranks(work, 2)


def test_more_segments_than_an_eager_tag_has_numbers_arrive_in_order():
    def work(cluster) -> None:
        numel = 150 * (1 << 17)  # 150 segments of float64 for each of 2 ranks, where a tag counts to 64
        x = torch.arange(2 * numel, dtype=torch.float64)
        collectives.all_reduce(x, op="mean")
        assert torch.equal(x, torch.arange(2 * numel, dtype=torch.float64))

    run_ranks(work, 2)
