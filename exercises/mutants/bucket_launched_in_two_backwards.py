"""After a backward that was dropped, ranks launch different numbers of buckets and mix them up."""

from torch import Tensor

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._drop_unfinished"
KILLER = (
    "tests.data_parallel.test_loops"
    ".test_a_dropped_backward_that_did_not_reach_all_layers_is_refused_on_all_ranks"
)
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"
SYMPTOM = "After a backward that was dropped, gradients are wrong, or training hangs."


def mutant(self, parameter: Tensor) -> None:
    is_kept = parameter.grad is self._bucket_of[parameter].views[parameter]
    self._guard.refuse_unless_dropped(parameter, is_kept)
    self._wait_for_all()
    self.order.forget()
