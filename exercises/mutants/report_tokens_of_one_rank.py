"""The report says that two ranks are as fast as one: it counts the tokens per second of one rank only."""

TARGET = "lab.trace.meter.Meter._tokens_per_second"
KILLER = "tests.training.test_run.test_tokens_per_second_are_those_of_all_ranks"
CAUSE = "only one of 2 parts"


def mutant(self) -> float | None:
    timed = self._timed()
    return len(timed) * self._tokens_per_step / self._cluster.world_size / sum(timed) if timed else None
