"""After a resume the loss jumps: all ranks have loaded the optimizer state of a parameter's first shard."""

import dataclasses

import torch.distributed.checkpoint as dcp

from lab.ranges import Items, LoadPlanner, Range, Reader
from training.range_checkpoint import Found

TARGET = "training.range_checkpoint.read"
KILLER = "tests.zero.test_zero_mutant_killers.test_a_rank_loads_the_optimizer_state_of_its_own_shards"
CAUSE = "belongs to the first one"


def mutant(found: Found, items: Items) -> None:
    wrong = {
        key: dataclasses.replace(item, start=0)
        if key.startswith("optimizer/") and isinstance(item, Range)
        else item
        for key, item in items.items()
    }
    reader = Reader(found.folder, found.metadata)
    dcp.load(wrong, storage_reader=reader, planner=LoadPlanner(False, False))
