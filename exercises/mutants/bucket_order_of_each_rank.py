"""One rank's backward takes another way, and from the second step on its gradients are others' by name."""

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._agree_on_order"
KILLER = "tests.data_parallel.test_equivalence.test_one_ranks_hooks_may_fire_in_another_order"


def mutant(self, observed: list[int]) -> None:
    self._next_order = observed + [i for i in self._order if i not in observed]
