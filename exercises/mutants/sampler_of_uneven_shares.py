"""Training hangs at the end of an epoch if the data does not divide: one rank has no last batch."""

from data_parallel.sampler import DistributedSampler

TARGET = "data_parallel.sampler.DistributedSampler"
KILLER = (
    "tests.data_parallel.test_sampler"
    ".test_with_pad_or_drop_shares_have_equal_lengths_and_equal_those_of_torchs_sampler"
)
CAUSE = "has a rank more or fewer than the others"


class mutant(DistributedSampler):
    def __init__(self, num_examples, rank, world_size, seed=0, uneven="keep") -> None:
        super().__init__(num_examples, rank, world_size, seed, "keep")
