"""With accumulation replicas drift apart: only the last microbatch's gradients are averaged over ranks."""

from torch import Tensor, nn

from comm.collectives import all_reduce
from data_parallel.train_overlap import OverlapDataParallel

TARGET = "data_parallel.train_overlap.OverlapDataParallel"
KILLER = (
    "tests.data_parallel.test_equivalence.test_gradients_of_microbatches_add_up_to_those_of_the_full_batch"
)
CAUSE = "not averaged over the ranks"


class mutant(OverlapDataParallel):
    def __init__(self, module: nn.Module, *args, **options) -> None:
        super().__init__(module, *args, **options)
        for parameter in self._trained:
            parameter.register_hook(self._reduce)

    def _reduce(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if self._guard.is_synchronising:
            all_reduce(gradient, op="mean", group=self.group, pattern=self.pattern)
        return gradient

    def _on_gradient(self, i: int) -> None:
        """Do nothing: the other hook does the work."""

    def finish_gradient_sync(self) -> None:
        """Do nothing: each hook has waited."""
