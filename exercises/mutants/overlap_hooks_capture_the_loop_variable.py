"""Replicas drift apart: all hooks reduce the last gradient, because a lambda captures its loop variable."""

from torch import nn

from comm.collectives import all_reduce
from data_parallel.guard import replace_hook
from data_parallel.train_overlap import OverlapDataParallel

TARGET = "data_parallel.train_overlap.OverlapDataParallel"
KILLER = "tests.data_parallel.test_narrated.test_overlap_equals_one_process"
CAUSE = "not averaged over the ranks"


class mutant(OverlapDataParallel):
    def __init__(self, module: nn.Module, *args, **options) -> None:
        super().__init__(module, *args, **options)
        for parameter in self._trained[::-1]:
            replace_hook(parameter, lambda _: self._reduce(parameter))

    def _reduce(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and self._guard.is_synchronising:
            options = {"group": self.group, "pattern": self.pattern, "async_op": True}
            self._in_flight.append((parameter.grad, all_reduce(parameter.grad, op="mean", **options)))

    def finish_gradient_sync(self) -> None:
        self._wait_for_all()
        self._guard.synchronised()
