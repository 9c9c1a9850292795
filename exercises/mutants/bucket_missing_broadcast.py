"""Replicas never agree: their gradients are averaged, but their initial weights are different."""

import copy

from torch import nn

from data_parallel.train_bucket_overlap import BucketDataParallel

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel"
KILLER = "tests.data_parallel.test_equivalence.test_ranks_start_from_rank_0s_parameters_and_buffers"
CAUSE = "broadcast missing"


class mutant(BucketDataParallel):
    def __init__(self, module: nn.Module, *args, **options) -> None:
        own = copy.deepcopy(module.state_dict())
        super().__init__(module, *args, **options)
        module.load_state_dict(own)  # undoes the broadcast
