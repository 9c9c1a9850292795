"""A program that reaches the ranks' network can run any code on them: they unpickle what it sends."""

from typing import Any

import torch.distributed as dist

TARGET = "comm.exchange.exchange"
KILLER = "tests.comm.test_exchange.test_a_value_that_would_run_code_when_it_is_read_is_refused_and_does_not"
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, value, group)
    return everyones
