"""Every epoch has the same batches in the same order: `set_epoch` has no effect."""

TARGET = "data_parallel.sampler.DistributedSampler.set_epoch"
KILLER = "tests.data_parallel.test_sampler.test_each_epoch_has_another_order"
CAUSE = "the same again"


def mutant(self, epoch: int) -> None:
    pass
