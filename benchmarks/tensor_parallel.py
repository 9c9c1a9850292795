"""Compare our tensor and sequence parallelism with PyTorch's DTensor: step times, cross entropy.

    python benchmarks/tensor_parallel.py                     tables; --json for one JSON line
    python benchmarks/tensor_parallel.py --quick             fewer runs

The ranks train a GPT of 12.9 million parameters with tied weights on the same two windows of 256 tokens. A
step is forward, backward and SGD. All variants share one process group and take turns, step by step. DTensor
is used as in tensor_parallel/train_dtensor.py, with one all-reduce for q, k and v.

The slow link is a software link (comm/wire/slow_link.py), the same for ours and DTensor. There DTensor's
collectives go through comm (`train_dtensor.by_comm`): DTensor decides when to start and when to wait, and
gloo moves the bytes. The link adds the time of the best-known algorithm, and for gloo's reduce-scatter the
time of an all-reduce. On loopback DTensor is unchanged.

The cross entropy has 512 tokens and a vocabulary of 32,768 entries. It is measured on loopback, forward and
backward. Its memory is what the process needs beyond the logits. "one process" is F.cross_entropy of the full
logits.
"""

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import SGD

from benchmarks import side_by_side
from benchmarks.side_by_side import GPT_13M, Rows, Seconds, Step, Training, medians, new_gpt, tokens
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace import meter
from tensor_parallel import train_dtensor
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tensor_parallel.parallelize import parallelize

MODES = ("tensor_parallel", "sequence_parallel")
LINKS = ("loopback", "1gbit")
ENTRIES, TOKENS = 32_768, 512  # vocabulary and tokens of the cross entropy


def step_of(cluster: Cluster, side: str, mode: str) -> Step:
    """Return a step of "ours" or "dtensor" on the same two windows on every rank."""
    module, divided = new_gpt(GPT_13M), mode == "sequence_parallel"
    model: torch.nn.Module
    if side == "ours":
        model = parallelize(module, sequence_parallel=divided)
    else:
        model = train_dtensor.DTensorGPT(module, cluster.device, divided)
    training = Training(model, SGD(model.parameters(), lr=1e-3), tokens(GPT_13M, 2))

    def step() -> None:
        with contextlib.nullcontext() if side == "ours" else loss_parallel():
            training()

    return step


def alternate(cluster: Cluster, runs: int) -> list[Seconds]:
    """Return the seconds of each step on this rank for each link. Keys are "ours MODE" and "dtensor MODE"."""
    steps = {f"{side} {mode}": step_of(cluster, side, mode) for side in ("ours", "dtensor") for mode in MODES}
    seconds = [side_by_side.alternate(steps, runs, warmup=1)]
    with train_dtensor.by_comm():
        return [*seconds, side_by_side.alternate(steps, runs, LINKS[1], warmup=0)]


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


def losses(cluster: Cluster, runs: int) -> Seconds:
    """Return the seconds of each forward and backward of the cross entropy on this rank."""
    steps = {kind: loss_of_shards(cluster, kind)[0] for kind in ("ours", "dtensor")}
    return side_by_side.alternate(steps, runs)


def loss_peak(cluster: Cluster, kind: str) -> int:
    """Return the peak bytes of a forward and backward of the cross entropy, beyond the logits."""
    side_by_side.unmap_freed_memory()
    step, logits = loss_of_shards(cluster, kind)
    step()  # memory that is allocated only once does not count
    logits.grad = None
    meter.reset_peak_memory(cluster.device)
    before = meter.peak_memory(cluster.device)
    step()
    return meter.peak_memory(cluster.device) - before


def rows_of(ranks: int, quick: bool) -> Rows:
    """Return rows for the steps of both modes on each link, and for the cross entropy."""
    row = functools.partial(side_by_side.row, ranks=ranks)
    by_rank = run_ranks(alternate, ranks, 3 if quick else 9, timeout=900)
    rows: Rows = []
    for link, *times in zip(LINKS, *by_rank, strict=True):
        by = medians(times)
        rows += [row(mode, "dtensor", by[f"ours {mode}"], by[f"dtensor {mode}"], link=link) for mode in MODES]
    seconds = medians(run_ranks(losses, ranks, 5 if quick else 15, timeout=300))
    ours, [full] = max(run_ranks(loss_peak, ranks, "ours")), run_ranks(loss_peak, 1, "full")
    rows.append(row("cross entropy time", "dtensor", seconds["ours"], seconds["dtensor"]))
    rows.append(row("cross entropy memory", "one process", ours, full, unit="bytes"))
    return rows


def main(args: side_by_side.Args) -> None:
    rows = rows_of(2, args.quick) + rows_of(4, args.quick)
    side_by_side.show("tensor_parallel", rows, args, "GPT of 12.9 M parameters")


if __name__ == "__main__":
    side_by_side.start(__file__)
