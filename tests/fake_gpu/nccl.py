"""Follow nccl's rules, as far as they are known here, with tensors on fake GPUs, gloo and threads.

      communicator   of a group, or of two ranks for their plain messages; made at the first use, which
                     holds up the host until all its ranks are there
      lane           the communicator's stream: operations wait for the stream that launched them, in order
      batch          sends and receives of a batch are one operation of the group's communicator

FAKE_EAGER=1   plain messages go through the group's communicator, as with init_process_group(device_id=...)
FAKE_LOG=1     print every operation
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fake_gpu.communicator import Communicator, Job, Lane
from tests.fake_gpu.device import extension

DTYPES = {torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.bool}
DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Communicators:
    """A process group's communicators; it does what nccl does for one group."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._made: dict[tuple[int, ...], Communicator] = {}
        self._batch: list[tuple[str, Tensor, int]] | None = None
        self._is_eager = bool(os.environ.get("FAKE_EAGER"))

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

    def all_gather_single(self, output: Tensor, mine: Tensor) -> Any:
        return self.all_gather_coalesced([output], [mine])

    def all_gather_coalesced(self, outputs: list[Tensor], inputs: list[Tensor]) -> Any:
        for output, mine in zip(outputs, inputs, strict=True):
            _refuse_unless(
                output.numel() == mine.numel() * self._size, "output tensor size must be n times the input's"
            )
            _refuse_unless(
                output.dtype == mine.dtype, "output tensor must have the same type as input tensor"
            )

        def job(all_ranks: Communicator) -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                host(output).view(-1).copy_(torch.cat(all_ranks.everyones(host(mine))))

        return self._collective("all_gather", inputs, outputs, job)

    def reduce_scatter(self, output: Tensor, parts: list[Tensor], op: Any) -> Any:
        def job(all_ranks: Communicator) -> None:
            total = all_ranks.reduced(torch.cat([host(part).view(-1) for part in parts]), op)
            host(output).view(-1).copy_(total.split([part.numel() for part in parts])[self._rank])

        return self._collective("reduce_scatter", parts, [output], job)

    def reduce_scatter_single(self, output: Tensor, full: Tensor, op: Any) -> Any:
        return self.reduce_scatter_coalesced([output], [full], op)

    def reduce_scatter_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], op: Any) -> Any:
        for output, full in zip(outputs, inputs, strict=True):
            _refuse_unless(
                full.numel() == output.numel() * self._size, "input tensor must be n times the output's size"
            )

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

    def all_to_all_single(
        self, output: Tensor, full: Tensor, out_sizes: list[int], in_sizes: list[int]
    ) -> Any:
        def sized(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
            return list(tensor.split(sizes or [len(tensor) // self._size] * self._size))

        return self.all_to_all(sized(output, out_sizes), sized(full, in_sizes))

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> Any:
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
        return self._collective(
            "barrier", [], [], lambda all_ranks: all_ranks.everyones(torch.zeros(1)), True
        )

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
        pair = range(self._size) if self._is_eager else sorted((self._rank, peer))
        return self._messages(verb, [(verb, tensor, peer)], self._of(pair))

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
        self,
        name: str,
        reads: list[Tensor],
        writes: list[Tensor],
        job: Callable[[Communicator], Any],
        blocks_host: bool = False,
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
        self,
        name: str,
        reads: list[Tensor],
        writes: list[Tensor],
        job: Job,
        lane: Lane,
        blocks_host: bool = False,
    ) -> Any:
        if os.environ.get("FAKE_LOG"):
            sizes = [tuple(tensor.shape) for tensor in (*reads, *writes)]
            print(f"fake nccl, rank {self._rank}: {name} {sizes} in lane {lane.number}", file=sys.stderr)
        operation = extension.Operation(name, lane.number, reads, writes)
        lane.put(operation, job)
        return extension.Work(operation, writes, blocks_host)


def host(tensor: Tensor) -> Tensor:
    """Return the same memory as a CPU tensor."""
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise RuntimeError("the memory of an operation under way was freed")
    return extension.on_host(tensor.detach())


def _check(name: str, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        _refuse_unless(tensor.is_cuda, f"No backend type associated with device type cpu ({name})")
        _refuse_unless(tensor.is_contiguous(), f"Tensors must be contiguous ({name})")
        known = tensor.dtype in DTYPES
        _refuse_unless(
            known, f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
        )


def _refuse_unless(is_right: bool, why: str) -> None:
    if not is_right:
        raise RuntimeError(why)
