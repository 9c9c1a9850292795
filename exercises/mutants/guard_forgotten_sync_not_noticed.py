"""A loop that forgets finish_gradient_sync() trains without an error, and the replicas drift apart."""

from torch.optim import Optimizer

TARGET = "data_parallel.guard.ReplicaGuard.before_step"
KILLER = "tests.data_parallel.test_wrapping.test_a_step_without_finish_gradient_sync_is_refused"
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"
SYMPTOM = "A loop that forgets finish_gradient_sync() trains without an error, and the replicas drift apart."


def mutant(self, optimizer: Optimizer) -> None:
    pass
