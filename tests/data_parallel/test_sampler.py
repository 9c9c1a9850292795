import pytest
import torch
from torch.utils.data import DistributedSampler as TorchSampler

from comm.collectives import all_reduce
from data_parallel.sampler import DistributedSampler, Uneven
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.refusals import refusal

SIZES = [(num_examples, world_size) for num_examples in (0, 1, 5, 12, 101) for world_size in (1, 2, 3, 4, 7)]


def shares(
    num_examples: int, world_size: int, epoch: int = 0, seed: int = 0, uneven: Uneven = "pad"
) -> list[list[int]]:
    samplers = [
        DistributedSampler(num_examples, rank, world_size, seed, uneven) for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler), f"len() is {len(sampler)}, and not the number of indices"
    return [list(sampler) for sampler in samplers]


def test_with_keep_shares_contain_each_example_once_and_lengths_differ_by_at_most_one():
    for num_examples, world_size in SIZES:
        kept = shares(num_examples, world_size, uneven="keep")
        assert sorted(index for share in kept for index in share) == list(range(num_examples))
        lengths = [len(share) for share in kept]
        assert max(lengths) - min(lengths) == (num_examples % world_size > 0)


def test_an_evaluation_on_kept_shares_counts_each_example_once():
    is_right = torch.arange(10) < 4  # 4 of 10 answers; no padding of 3 shares to 12 leaves 40 %

    def work(cluster: Cluster) -> float:
        share = list(DistributedSampler(10, cluster.rank, 3, uneven="keep"))
        right_and_all = torch.tensor([is_right[share].sum().item(), len(share)], dtype=torch.float64)
        all_reduce(right_and_all)
        return (right_and_all[0] / right_and_all[1]).item()

    assert run_ranks(work, 3) == [0.4] * 3


def test_with_pad_or_drop_shares_have_equal_lengths_and_equal_those_of_torchs_sampler():
    for num_examples, world_size in SIZES:
        for uneven in ("pad", "drop"):
            ours = shares(num_examples, world_size, epoch=2, seed=7, uneven=uneven)
            assert len({len(share) for share in ours}) == 1
            for rank, share in enumerate(ours):
                theirs = TorchSampler(
                    range(num_examples), world_size, rank, seed=7, drop_last=uneven == "drop"
                )
                theirs.set_epoch(2)
                what = f"{num_examples} examples, {world_size} ranks, uneven={uneven!r}, rank {rank}"
                assert share == list(theirs), what


def test_each_epoch_has_another_order_that_can_be_repeated():
    sampler = DistributedSampler(100, rank=1, world_size=2)
    orders = set()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 5
    assert shares(100, 2, epoch=3) == shares(100, 2, epoch=3)
    assert shares(100, 1)[0] != list(range(100))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((5, 0, 2, 0, "stretch"), "uneven='stretch': choose one of pad, drop, keep"),
        ((10, -1, 2), "Rank -1 is not one of 2 ranks, which are 0 to 1"),
        ((10, 2, 2), "Rank 2 is not one of 2 ranks, which are 0 to 1"),
        (({"x": 1}, 0, 1), "num_examples is a number: give len(dataset)"),
    ],
)
def test_what_makes_no_sampler_is_refused_in_a_sentence(arguments: tuple, sentence: str):
    assert sentence in refusal(DistributedSampler, *arguments)
