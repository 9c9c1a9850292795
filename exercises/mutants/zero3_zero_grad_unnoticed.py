"""A GAN does not learn: the discriminator keeps gradients that zero_grad() should have cleared."""

TARGET = "zero.unit.ShardedUnit.adopt_gradients"
KILLER = "tests.zero.test_zero3_loops.test_a_gan_learns_as_in_one_process"
CAUSE = "zero_grad()"


def mutant(self) -> list:
    return []
