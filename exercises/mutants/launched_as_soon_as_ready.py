"""If one rank computes gradients in another order, ranks average different parameters' gradients, or hang."""

TARGET = "data_parallel.ordered_launcher.OrderedLauncher.ready"
KILLER = "tests.data_parallel.test_equivalence.test_hooks_on_one_rank_may_fire_in_another_order"
CAUSE = "one order on which they have agreed"
SYMPTOM = "When one rank computes gradients in another order, training hangs, or the gradients are wrong."


def mutant(self, i: int) -> None:
    self._ready.add(i)
    self._launch(i)
