"""Follow nccl's rules, as far as they are known here, with tensors on fake GPUs, gloo and threads.

      communicator   of a group, or of two ranks for their plain messages; made at the first use, which
                     holds up the host until all its ranks are there
      lane           the communicator's stream: operations wait for the stream that launched them, in order
      batch          sends and receives of a batch are one operation of the group's communicator
      watchdog       aborts the process if an operation has not ended within the group's timeout, which
                     counts from its launch: a host runs ahead of its GPU

README.md lists the variables that change how it behaves.
"""

import faulthandler
import itertools
import os
import queue
import random
import signal
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

from comm.wire.groups import is_lost_connection
from tests.fake_gpu.device import extension

DTYPES = {torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.bool}
DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
REDUCE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}

Job = Callable[[], None]


class Turns:
    """Decides when operations begin: with NCCL_LAUNCH_ORDER_IMPLICIT=1, in the order of their launches."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._under_way: dict[int, tuple[str, float, float]] = {}  # what, when it was launched, its timeout
        self._running = 0
        self._numbers = itertools.count(1)

    def launched(self, what: str, timeout: float) -> int:
        """Give an operation its number."""
        with self._changed:
            self._waiting.append(number := next(self._numbers))
            self._under_way[number] = what, time.monotonic(), timeout
        if number == 1:  # not sooner, as a rank is forked
            threading.Thread(target=self._watch, name="fake nccl's watchdog", daemon=True).start()
        return number

    def begin(self, number: int) -> None:
        """Wait until the operation may begin."""
        if seed := os.environ.get("FAKE_ORDER"):
            time.sleep(random.Random(f"{seed} {dist.get_rank()} {number}").random() * 0.003)
        is_in_order = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
        most = int(os.environ.get("FAKE_RESIDENT", "1000"))
        with self._changed:
            self._changed.wait_for(
                lambda: self._running < most and not (is_in_order and self._waiting[0] < number)
            )
            self._waiting.remove(number)
            self._running += 1
            self._changed.notify_all()

    def end(self, number: int) -> None:
        with self._changed:
            del self._under_way[number]
            self._running -= 1
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            time.sleep(0.1)
            with self._changed:
                for what, since, timeout in self._under_way.values():
                    if (seconds := time.monotonic() - since) > timeout:
                        ran = f"Timeout(ms)={1000 * timeout:.0f}, ran for {1000 * seconds:.0f} milliseconds"
                        why = f"Watchdog caught collective operation timeout: {what}, {ran}"
                        print(f"{why} before timing out.", file=sys.stderr, flush=True)
                        os.abort()


turns = Turns()


class Lane:
    """A thread that runs a communicator's operations in order."""

    made = 0

    def __init__(self) -> None:
        Lane.made += 1
        self.number = Lane.made
        self.queue: queue.Queue[tuple[int, Any, Job]] = queue.Queue()
        threading.Thread(target=self._serve, name="fake nccl", daemon=True).start()

    def _serve(self) -> None:
        while True:
            number, operation, job = self.queue.get()
            try:
                operation.wait_until_it_may_begin()
                turns.begin(number)
                time.sleep(float(os.environ.get("FAKE_SLOW", "0")))
                job()
            except BaseException as error:
                if is_lost_connection(str(error)):  # with nccl the survivors of a death wait without end
                    threading.Event().wait()
                traceback.print_exc()
                end("an operation failed")
            turns.end(number)
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
        host = os.environ.get("NCCL_HOSTID", "")  # ranks with another one seem to be elsewhere
        store.set(f"device of {rank}", f"{host} {device}")
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


class Communicators:
    """A process group's communicators; it does what nccl does for one group."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout = options._timeout.total_seconds()
        self._made: dict[tuple[int, ...], Communicator] = {}
        self._batch: list[tuple[str, Tensor, int]] | None = None

    # Collectives: `mine` is this rank's contribution, and the results are written to outputs.

    def all_reduce(self, tensors: list[Tensor], op: Any) -> Any:
        def job(all_ranks: Communicator) -> None:
            for tensor in map(host, tensors):
                tensor.view(-1).copy_(all_ranks.reduced(tensor, op))

        return self._collective("all_reduce", tensors, tensors, job)

    def broadcast(self, tensors: list[Tensor], root: int) -> Any:
        def job(all_ranks: Communicator) -> None:
            for tensor in map(host, tensors):
                tensor.view(-1).copy_(all_ranks.everyones(tensor)[root])

        is_root = self._rank == root
        return self._collective("broadcast", tensors, [] if is_root else tensors, job)

    def reduce(self, tensors: list[Tensor], op: Any, root: int) -> Any:
        def job(all_ranks: Communicator) -> None:
            total = all_ranks.reduced(host(tensors[0]), op)
            if self._rank == root:
                host(tensors[0]).view(-1).copy_(total)

        return self._collective("reduce", tensors, tensors, job)

    def all_gather(self, outputs: list[Tensor], mine: Tensor) -> Any:
        def job(all_ranks: Communicator) -> None:
            for output, found in zip(outputs, all_ranks.everyones(host(mine)), strict=True):
                host(output).view(-1).copy_(found)

        return self._collective("all_gather", [mine], outputs, job)

    def all_gather_coalesced(self, outputs: list[Tensor], inputs: list[Tensor]) -> Any:
        for output, mine in zip(outputs, inputs, strict=True):
            if output.numel() != mine.numel() * self._size or output.dtype != mine.dtype:
                raise RuntimeError("output must have the input's type and n times its size")

        def job(all_ranks: Communicator) -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                host(output).view(-1).copy_(torch.cat(all_ranks.everyones(host(mine))))

        return self._collective("all_gather", inputs, outputs, job)

    def reduce_scatter_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], op: Any) -> Any:
        if any(full.numel() != out.numel() * self._size for out, full in zip(outputs, inputs, strict=True)):
            raise RuntimeError("input tensor must be n times the output's size")

        def job(all_ranks: Communicator) -> None:
            for output, full in zip(outputs, inputs, strict=True):
                parts = all_ranks.reduced(host(full), op).view(self._size, -1)
                host(output).view(-1).copy_(parts[self._rank])

        return self._collective("reduce_scatter", inputs, outputs, job)

    def gather(self, outputs: list[Tensor], mine: Tensor, root: int) -> Any:
        def job(all_ranks: Communicator) -> None:
            found = all_ranks.everyones(host(mine))
            for output, part in zip(outputs, found, strict=bool(outputs)):
                host(output).view(-1).copy_(part)

        return self._collective("gather", [mine], outputs, job)

    def scatter(self, output: Tensor, parts: list[Tensor], root: int) -> Any:
        def job(all_ranks: Communicator) -> None:
            mine = [host(part).view(-1) for part in parts] or [host(output).view(-1)] * self._size
            found = all_ranks.everyones(torch.cat(mine))[root].view(self._size, -1)
            host(output).view(-1).copy_(found[self._rank])

        return self._collective("scatter", parts, [output], job)

    def all_to_all(self, output: Tensor, full: Tensor, outs: list[int], ins: list[int]) -> Any:
        def sized(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
            return list(tensor.split(sizes or [len(tensor) // self._size] * self._size))

        outputs, inputs = sized(output, outs), sized(full, ins)

        def job(all_ranks: Communicator) -> None:
            # Each rank gets all contributions, padded to the longest, and takes its own.
            own = torch.tensor([part.numel() for part in inputs])
            sizes = torch.stack(all_ranks.everyones(own))
            mine = torch.zeros(int(sizes.sum(1).max()), dtype=inputs[0].dtype)
            mine[: int(own.sum())] = torch.cat([host(part).view(-1) for part in inputs])
            for rank, found in enumerate(all_ranks.everyones(mine)):
                part = found[: int(sizes[rank].sum())].split(sizes[rank].tolist())[self._rank]
                host(outputs[rank]).view(-1).copy_(part)

        return self._collective("all_to_all", inputs, outputs, job)

    def barrier(self) -> Any:
        """Run an all-reduce and make the host wait for it."""
        meet = lambda all_ranks: all_ranks.everyones(torch.zeros(1))  # noqa: E731
        return self._collective("barrier", [], [], meet, True)

    # Plain messages.

    def send(self, tensor: Tensor, peer: int) -> Any:
        return self._message("send", tensor, peer)

    def recv(self, tensor: Tensor, peer: int) -> Any:
        return self._message("recv", tensor, peer)

    def start_coalescing(self) -> None:
        self._batch = []

    def end_coalescing(self) -> Any:
        batch, self._batch = self._batch or [], None
        all_ranks = self._of(range(self._size))
        return self._messages("batch", batch, all_ranks)

    def _message(self, verb: str, tensor: Tensor, peer: int) -> Any:
        _check(verb, [tensor])
        if self._batch is not None:
            self._batch.append((verb, tensor, peer))
            return None
        return self._messages(verb, [(verb, tensor, peer)], self._of(sorted((self._rank, peer))))

    def _messages(self, name: str, messages: list[tuple[str, Tensor, int]], among: Communicator) -> Any:
        def job() -> None:
            under_way = []
            for verb, tensor, peer in messages:
                start = among.gloo.send if verb == "send" else among.gloo.recv
                under_way.append(start([host(tensor).view(-1)], among.ranks.index(peer), 0))
            for one in under_way:
                one.wait()

        sent = [tensor for verb, tensor, _ in messages if verb == "send"]
        received = [tensor for verb, tensor, _ in messages if verb == "recv"]
        return self._launch(name, sent, received, job, among.lane)

    def _collective(
        self, name: str, reads: list[Tensor], writes: list[Tensor], job: Any, blocks_host: bool = False
    ) -> Any:
        _check(name, [*reads, *writes])
        all_ranks = self._of(range(self._size))
        return self._launch(name, reads, writes, lambda: job(all_ranks), all_ranks.lane, blocks_host)

    def _of(self, ranks: Any) -> Communicator:
        key = tuple(ranks)
        if key not in self._made:
            self._made[key] = Communicator(self._store, list(key), self._rank, extension.current_device())
        return self._made[key]

    def _launch(
        self, name: str, reads: list[Tensor], writes: list[Tensor], job: Job, lane: Lane, blocks: bool = False
    ) -> Any:
        die_if_due()
        operation = extension.Operation(name, lane.number, reads, writes)
        number = turns.launched(f"{name} of rank {self._rank}", self._timeout)
        lane.queue.put((number, operation, job))
        return extension.Work(operation, writes, blocks)


launched = itertools.count(1)


def die_if_due() -> None:
    """Kill this process if FAKE_DIE names its rank and this operation."""
    rank, _, at = os.environ.get("FAKE_DIE", "").partition("@")
    if next(launched) == int(at or 0) and os.environ.get("RANK") == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def host(tensor: Tensor) -> Tensor:
    """Return the same memory as a CPU tensor."""
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise RuntimeError("the memory of an operation under way was freed")
    return extension.on_host(tensor.detach())


def _check(name: str, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_cuda:
            raise RuntimeError(f"No backend type associated with device type cpu ({name})")
        if not tensor.is_contiguous():
            raise RuntimeError(f"Tensors must be contiguous ({name})")
        if tensor.dtype not in DTYPES:
            raise RuntimeError(f"Input tensor data type is not supported for NCCL: {tensor.dtype}")
