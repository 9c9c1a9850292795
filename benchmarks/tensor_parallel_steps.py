"""Run the ranks' part of benchmarks/tensor_parallel.py: steps and losses, ours and DTensor's."""

import contextlib
import ctypes

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks import side_by_side
from benchmarks.data_parallel_steps import CONFIG, Step, text
from comm.wire import slow_link
from lab.cluster import Cluster
from lab.models.model import GPT, loss_of
from lab.trace import meter
from lab.trace.ledger import LEDGER
from tensor_parallel import train_dtensor
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tensor_parallel.parallelize import parallelize

MODES = ("tensor_parallel", "sequence_parallel")
ENTRIES, TOKENS = 32_768, 512  # vocabulary and tokens of the cross entropy


def our_step(mode: str) -> Step:
    """Return a step of our model: forward, backward and update on the same two windows on every rank."""
    model = parallelize(GPT(CONFIG), sequence_parallel=mode == "sequence_parallel")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = text()

    def step() -> None:
        optimizer.zero_grad()
        model.loss(model(x), y).backward()
        model.finish_gradient_sync()
        optimizer.step()

    return step


def their_step(cluster: Cluster, mode: str) -> Step:
    """Return the same step with DTensor. SGD reads each gradient once, so Partial ones are reduced once."""
    model = train_dtensor.DTensorGPT(GPT(CONFIG), cluster.device, mode == "sequence_parallel")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = text()

    def step() -> None:
        optimizer.zero_grad()
        with loss_parallel():
            loss_of(model(x), y).backward()
        optimizer.step()

    return step


def alternate(
    cluster: Cluster, plan: list[tuple[str, int]], warmup: int, with_bytes: bool
) -> tuple[list[dict[str, list[float]]], dict[str, int]]:
    """Return the seconds of each step on this rank for each link of the plan, and the bytes of one more step.

    The plan lists (link, number of runs). Keys are "ours MODE" and "dtensor MODE". Without `with_bytes` there
    are no bytes.
    """
    steps = {f"ours {mode}": our_step(mode) for mode in MODES}
    steps |= {f"dtensor {mode}": their_step(cluster, mode) for mode in MODES}
    side_by_side.alternate(steps, 0, warmup=warmup)
    seconds = []
    for link, runs in plan:
        slow = None if link == "loopback" else slow_link.parse(link)
        # On loopback DTensor is unchanged. Only comm can be slowed down, so on a slow link it uses comm.
        with contextlib.nullcontext() if slow is None else train_dtensor.by_comm():
            seconds.append(side_by_side.alternate(steps, runs, slow, warmup=0))
    sent = {}
    with train_dtensor.by_comm():
        for name, step in steps.items() if with_bytes else ():
            before = LEDGER.total()
            step()
            sent[name] = (LEDGER.total() - before).bytes_sent
    return seconds, sent


def loss_of_shards(cluster: Cluster, kind: str) -> tuple[Step, torch.Tensor]:
    """Return forward and backward of the cross entropy as one function, and its logits.

    The logits are those of the full vocabulary for "full", and those of this rank's shard for "ours" and
    "dtensor".
    """
    entries = ENTRIES if kind == "full" else ENTRIES // cluster.world_size
    logits = torch.randn(TOKENS, entries, generator=torch.Generator().manual_seed(cluster.rank))
    logits.requires_grad_()
    targets = torch.randint(ENTRIES, (TOKENS,), generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh(cluster.device.type, (cluster.world_size,))

    def step() -> None:
        logits.grad = None
        if kind == "ours":
            vocab_parallel_cross_entropy(logits, targets).backward()
        elif kind == "full":
            F.cross_entropy(logits, targets).backward()
        else:
            with loss_parallel():
                full = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False)
                F.cross_entropy(full, targets).backward()

    return step, logits


def losses(cluster: Cluster, runs: int) -> dict[str, list[float]]:
    """Return the seconds of each forward and backward of the cross entropy on this rank."""
    steps = {kind: loss_of_shards(cluster, kind)[0] for kind in ("ours", "dtensor")}
    return side_by_side.alternate(steps, runs)


def loss_peak(cluster: Cluster, kind: str) -> int:
    """Return the peak bytes of a forward and backward of the cross entropy, beyond the logits."""
    # glibc keeps freed memory unless it is a mapping of its own, which would hide what a step needs.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    step, logits = loss_of_shards(cluster, kind)
    step()  # memory that is allocated only once does not count
    logits.grad = None
    meter.reset_peak_memory(cluster.device)
    before = meter.peak_memory(cluster.device)
    step()
    return meter.peak_memory(cluster.device) - before
