"""Point to point: one rank sends a tensor to another. This file shows a ring that deadlocks, and two cures.

      blocking       send returns when the tensor may be changed again, recv when the tensor has arrived.
      non-blocking   isend and irecv return at once, and wait() returns when the message is done. Post the
                     receive first: the payload moves only after its receive has been posted.

The ring that deadlocks: every rank sends to its right neighbour, and then receives from its left one. A
blocking send waits for its receive, so every rank waits for a neighbour that is still sending, even with tiny
messages. (MPI may buffer small messages, and then the mistake shows only with large ones.)

      rank 0 ─send─► rank 1 ─send─► rank 2 ─send─► rank 0 ...        no rank receives

The first cure breaks the symmetry: even ranks send first, odd ranks receive first. It works for any number of
ranks: if n is odd, ranks n-1 and 0 both send first, and rank n-1 waits until rank 0 has sent and receives.
The second cure uses non-blocking calls.

A message of b bytes takes alpha + b * beta seconds: alpha is its latency, beta the time of a byte (Hockney,
1994). Tiny messages around the ring measure alpha, and large ones beta (`measure_link` in patterns.py).

`isend` and `irecv` work like those of torch.distributed, and their bytes are counted (wire/transfers.py).
They travel as those of collectives do: through shared memory or over sockets (wire/streams.py).
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from comm import collectives
from comm.patterns import measure_link
from comm.same_start import check_same_start
from comm.script import start
from comm.wire.gloo_wire import peer_wire
from comm.wire.groups import Group, message_device
from comm.wire.transfers import AnyTransfer, irecv, isend
from lab import units
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.trace.timeline import span


def send(tensor: torch.Tensor, dst: int, group: Group = None) -> None:
    """Send, and wait. On the CPU it returns after `dst` has posted its receive."""
    isend(tensor, dst, group).wait()


def recv(tensor: torch.Tensor, src: int, group: Group = None) -> None:
    """Receive, and wait."""
    irecv(tensor, src, group).wait()


def ring_send_first(outgoing: torch.Tensor, incoming: torch.Tensor, group: Group = None) -> None:
    """Deadlock: every rank sends to its right neighbour, and no rank receives."""
    left, right = _neighbours(group)
    send(outgoing, right, group)
    recv(incoming, left, group)


def ring_even_odd(outgoing: torch.Tensor, incoming: torch.Tensor, group: Group = None) -> None:
    """Let even ranks send first and odd ranks receive first: the first cure."""
    left, right = _neighbours(group)
    if dist.get_rank(group) % 2 == 0:
        send(outgoing, right, group)
        recv(incoming, left, group)
    else:
        recv(incoming, left, group)
        send(outgoing, right, group)


def ring_non_blocking(outgoing: torch.Tensor, incoming: torch.Tensor, group: Group = None) -> None:
    """Post the receive, post the send, then wait for both: the second cure. Both directions move at once."""
    InFlightShift(outgoing, incoming, group).wait()


class InFlightShift:
    """A message to the right neighbour and one from the left one, for all ranks of a group together.

    The constructor starts both. Do not change `outgoing` before `wait`, which returns `incoming`. A tensor
    without elements is not sent.

    On nccl the two are posted as one batch. There a pair of ranks has one first-in-first-out queue: if both
    ranks posted their receives first, neither send would start.
    """

    def __init__(self, outgoing: torch.Tensor, incoming: torch.Tensor, group: Group = None) -> None:
        left, right = _neighbours(group)
        self._incoming = incoming
        if message_device(group).type == "cuda":
            self._transfers: Sequence[AnyTransfer] = peer_wire(group).batch(outgoing, right, incoming, left)
        else:
            self._transfers = [irecv(incoming, left, group), isend(outgoing, right, group)]

    def wait(self) -> torch.Tensor:
        """Wait until both messages are done, and return what has arrived."""
        with span("message", "wait"):
            for transfer in self._transfers:
                transfer.wait()
        return self._incoming


def _neighbours(group: Group) -> tuple[int, int]:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    return (rank - 1) % n, (rank + 1) % n


MAX_MESSAGE_MB = 1 << 13  # 8 GiB


@dataclasses.dataclass
class Args:
    """Run the two rings that work, and measure this link's alpha and beta."""

    mb: float = 4.0
    """Size of the message in the rings, in MiB."""
    json: bool = False
    """Print all figures as one line of JSON at the end, on stdout; everything else goes to stderr."""


def validate_message(megabytes: float) -> None:
    """Raise WorkbookError if a message cannot hold one element, or if it is too large for a machine."""
    if not 1e-5 <= megabytes <= MAX_MESSAGE_MB:
        raise WorkbookError(f"--mb {megabytes:g}: choose a size from 0.00001 to {MAX_MESSAGE_MB} MiB.")


def main(cluster: Cluster, args: Args) -> None:
    validate_message(args.mb)
    check_same_start(torch.empty(0), {"--mb": args.mb})
    if cluster.world_size < 2:
        raise WorkbookError("Point to point needs two ranks: start at least 2 (WORLD_SIZE=2).")
    out = sys.stderr if args.json else sys.stdout
    rings: list[Callable[..., None]] = [ring_even_odd, ring_non_blocking]
    figures: dict[str, float | str | int] = {"run_mode": "point_to_point", "world_size": cluster.world_size}
    for ring in rings:
        outgoing = torch.full((int(args.mb * (1 << 18)),), float(cluster.rank), device=message_device(None))
        incoming = torch.empty_like(outgoing)
        ring(outgoing, incoming)  # the first message opens the connections
        collectives.barrier()
        start = time.perf_counter()
        ring(outgoing, incoming)
        collectives.barrier()  # on nccl the GPU starts it after the ring, and the host waits for it
        figures[f"{ring.__name__}_seconds"] = seconds = time.perf_counter() - start
        assert incoming[0] == (cluster.rank - 1) % cluster.world_size
        if cluster.is_main:
            print(
                f"{ring.__name__:<20} {args.mb:g} MiB to the right: {units.show_seconds(seconds)}", file=out
            )
    link = measure_link()
    figures |= {"alpha_seconds": link.alpha, "beta_seconds_per_byte": link.beta}
    if cluster.is_main:
        print(
            "ring_send_first      never ends: it is not run (see tests/comm/test_point_to_point.py)", file=out
        )
        beta = f"{units.show_seconds(link.beta)} for each byte ({units.show_rate(link.beta)})"
        print(f"alpha                {units.show_seconds(link.alpha)} for each message", file=out)
        print(f"beta                 {beta}", file=out)
        whole = units.show_seconds(link.alpha + args.mb * (1 << 20) * link.beta)
        print(f"{args.mb:g} MiB alone take about alpha + {args.mb:g} MiB * beta = {whole}.", file=out)
        print("make run RUN_MODE=comm ARGS='--link none' compares collectives with that formula.", file=out)
        if args.json:
            print(json.dumps(figures))


if __name__ == "__main__":
    start(main, Args)
