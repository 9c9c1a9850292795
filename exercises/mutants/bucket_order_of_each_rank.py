"""When one rank computes gradients in another order, parameters get the gradients of other parameters."""

from comm.collectives import Group

TARGET = "data_parallel.bucket_order.BucketOrder.adopt_observed"
KILLER = "tests.data_parallel.test_equivalence.test_hooks_on_one_rank_may_fire_in_another_order"
CAUSE = "one order on which they have agreed"
SYMPTOM = "When one rank computes gradients in another order, parameters learn from wrong gradients."


def mutant(self, group: Group) -> bool:
    if self._seen is None:
        return False
    before, self._numbers, self._seen = self._numbers, self._observed(self._seen), None
    return self._numbers != before
