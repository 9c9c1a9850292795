"""Stage 2 takes as much memory as stage 1: views of the room outlive it, and with them all its bytes."""

TARGET = "data_parallel.gradient_shard.GradientShard.wait"
KILLER = "tests.data_parallel.test_zero_mutant_killers.test_stage_2_keeps_its_shard_of_the_gradient_only"


def mutant(self) -> None:
    (arrived, handle), self._arriving = self._arriving, None
    handle.wait()
    self._room = None
    self.shard = arrived if self.shard is None else self.shard + arrived
