"""A GAN does not learn: the discriminator keeps gradients that zero_grad() should have cleared."""

TARGET = "data_parallel.unit.ShardedUnit.adopt_gradients"
KILLER = "tests.data_parallel.test_zero3_loops.test_a_gan_learns_as_in_one_process"
CAUSE = "zero_grad()"


def mutant(self) -> list:
    return []
