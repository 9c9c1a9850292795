"""`set_epoch` has no effect: every epoch shows the same batches in the same order."""

TARGET = "data_parallel.sampler.DistributedSampler.set_epoch"
KILLER = "tests.data_parallel.test_sampler.test_each_epoch_has_another_order"


def mutant(self, epoch: int) -> None:
    pass
