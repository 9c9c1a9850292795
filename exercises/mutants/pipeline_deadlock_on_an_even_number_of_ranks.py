"""With tied weights training hangs on 2 or 4 ranks but not on 3: two ranks wait for each other to receive."""

import torch

from comm.point_to_point import recv, send

TARGET = "pipeline_parallel.pipeline.Pipeline.finish_gradient_sync"
KILLER = (
    "tests.pipeline_parallel.test_mutant_killers"
    ".test_tied_gradients_are_exchanged_whether_the_number_of_ranks_is_odd_or_even"
)
FAILS_WITH = "waited until the timeout"
CAUSE = "deadlock"


def mutant(self) -> None:
    for mine, peer in self._shared():
        others = torch.empty_like(mine.grad)
        hops = (peer - self.rank) % len(self.table)
        if hops % 2 == 1:
            send(mine.grad, peer, self.group)
            recv(others, peer, self.group)
        else:
            recv(others, peer, self.group)
            send(mine.grad, peer, self.group)
        mine.grad += others
