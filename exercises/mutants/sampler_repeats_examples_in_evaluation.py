"""The accuracy depends on the number of ranks: in an evaluation too the sampler repeats examples."""

from data_parallel.sampler import DistributedSampler

TARGET = "data_parallel.sampler.DistributedSampler"
KILLER = "tests.data_parallel.test_sampler.test_an_evaluation_on_kept_shares_counts_each_example_once"
CAUSE = "count twice"


class mutant(DistributedSampler):
    def __init__(self, num_examples, rank, world_size, seed=0, uneven="pad") -> None:
        super().__init__(num_examples, rank, world_size, seed, "pad" if uneven == "keep" else uneven)
