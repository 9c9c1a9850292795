"""Training stops if one rank does not use a parameter: the flags pair with a gradient of another rank."""

import torch

from comm.collectives import all_reduce

TARGET = "data_parallel.train_overlap.OverlapDataParallel.finish_gradient_sync"
KILLER = (
    "tests.data_parallel.test_late_gradients."
    "test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all"
)
FAILS_WITH = "The ranks do not fit together"
CAUSE = "in different orders"


def mutant(self) -> None:
    used = torch.tensor([parameter.grad is not None for parameter in self._trained], dtype=torch.uint8)
    all_reduce(used, op="max", group=self.group, pattern=self.pattern)
    unused = self._launcher.missing()
    for i in unused:
        if self._trained[i].grad is None:
            self._trained[i].grad = torch.zeros_like(self._trained[i])
        self._launcher.ready(i)
    self._wait_for_all()
    for i in unused:
        if not used[i]:
            self._trained[i].grad = None
    self._guard.synchronised()
