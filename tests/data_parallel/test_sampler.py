import torch
from torch.utils.data import DistributedSampler as TorchSampler

from data_parallel.sampler import DistributedSampler


def shares(num_examples: int, world_size: int, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    samplers = [DistributedSampler(num_examples, rank, world_size, seed) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
    return [list(sampler) for sampler in samplers]


def test_shares_are_disjoint_and_cover_the_data_for_any_sizes():
    for num_examples in (0, 1, 5, 12, 101):
        for world_size in (1, 2, 3, 4, 7):
            together = [index for share in shares(num_examples, world_size) for index in share]
            assert sorted(together) == list(range(num_examples))


def test_shares_differ_in_length_by_at_most_one():
    lengths = [len(share) for share in shares(101, 4)]
    assert max(lengths) - min(lengths) == 1


def test_each_epoch_has_another_order():
    sampler = DistributedSampler(100, rank=1, world_size=2)
    orders = set()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 5


def test_an_epoch_can_be_repeated():
    assert shares(100, 2, epoch=3) == shares(100, 2, epoch=3)


def test_the_examples_are_shuffled():
    assert shares(100, 1)[0] != list(range(100))


def test_shares_are_those_of_torchs_sampler_where_the_ranks_divide_the_examples():
    for rank in range(4):
        theirs = TorchSampler(torch.arange(100), num_replicas=4, rank=rank, seed=7)
        theirs.set_epoch(2)
        assert list(theirs) == shares(100, 4, epoch=2, seed=7)[rank]
