"""Provide a communicator of the fake nccl, and the thread that runs its operations.

FAKE_SLOW      seconds that every operation takes longer
FAKE_TIMEOUT   seconds after which waiting is reported as a deadlock (25)
"""

import faulthandler
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REDUCE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}

Job = Callable[[], None]


class Lane:
    """A thread that runs a communicator's operations in order."""

    made = 0

    def __init__(self) -> None:
        Lane.made += 1
        self.number = Lane.made
        self._queue: queue.Queue[tuple[Any, Job]] = queue.Queue()
        threading.Thread(target=self._serve, name="fake nccl", daemon=True).start()

    def put(self, operation: Any, job: Job) -> None:
        self._queue.put((operation, job))

    def _serve(self) -> None:
        while True:
            operation, job = self._queue.get()
            try:
                operation.wait_until_it_may_begin()
                time.sleep(float(os.environ.get("FAKE_SLOW", "0")))
                job()
            except BaseException:
                traceback.print_exc()
                end("an operation failed")
            operation.done()
            del operation, job


class Communicator:
    """A meeting point of some ranks of a group. `ranks` lists their ranks in the group, in order."""

    def __init__(self, store: dist.Store, ranks: list[int], rank: int, device: int) -> None:
        self.lane, self.ranks = Lane(), ranks
        name = "-".join(map(str, ranks))
        store = dist.PrefixStore(f"communicator {name}", store)
        made: list[Any] = []

        def meet() -> None:
            limit = timedelta(seconds=300)
            made.append(dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), timeout=limit))

        # In a thread, so that a circle of waiting ranks is noticed.
        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        thread.join(float(os.environ.get("FAKE_TIMEOUT", "25")))
        if not made:
            end(f"a deadlock, rank {rank} waits in ncclCommInitRank for the others of ranks {name}")
        self.gloo = made[0]
        store.set(f"device of {rank}", str(device))
        devices = {store.get(f"device of {other}") for other in ranks}
        if len(devices) < len(ranks):
            raise RuntimeError(f"ncclInvalidUsage: Duplicate GPU detected : ranks {name} on {devices}")

    def everyones(self, mine: Tensor) -> list[Tensor]:
        """Return each rank's tensor of the same size."""
        flat = mine.contiguous().view(-1)
        if len(self.ranks) == 1 or not flat.numel():
            return [flat.clone() for _ in self.ranks]
        message = flat.view(torch.uint8)
        found = [torch.empty_like(message) for _ in self.ranks]
        self.gloo.allgather([found], [message]).wait()
        return [one.view(mine.dtype) for one in found]

    def reduced(self, mine: Tensor, op: Any) -> Tensor:
        """Return the reduction in the order of ranks; half-precision numbers are added in float32."""
        parts = self.everyones(mine)
        if mine.dtype in (torch.float16, torch.bfloat16):
            parts = [part.float() for part in parts]
        total = reduce(REDUCE[op.op if hasattr(op, "op") else op], parts)
        return (total / len(parts) if op == dist.ReduceOp.AVG else total).to(mine.dtype)


def end(why: str) -> None:
    """End this process; real ranks would hang, or be ended by nccl's watchdog."""
    print(f"fake nccl: {why}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=False)
    os._exit(8)
