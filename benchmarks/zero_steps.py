"""Run the ranks' part of benchmarks/zero.py: steps of ZeRO's stages, with their times, bytes and memory."""

import copy
import ctypes
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from benchmarks import side_by_side
from benchmarks.data_parallel_steps import CAP_MB, CONFIG, Turns, text
from comm.wire import slow_link
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_naive import NaiveDataParallel
from lab.cluster import Cluster
from lab.models.model import GPT, loss_of
from lab.trace import meter
from lab.trace.ledger import LEDGER
from lab.trace.memory import live_bytes
from zero import train_fsdp
from zero.memory import Held, MemoryReport
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

OPTIONS: dict[str, Any] = {"lr": 1e-3}
WINDOWS = 1  # windows of text for each rank and step
STAGES = {"naive": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclasses.dataclass
class Training:
    """Trains a model: a call takes one step and counts the bytes that this rank sends."""

    model: nn.Module
    optimizer: Optimizer
    sync: Callable[[], object]  # what a variant calls between backward and step
    batch: tuple[Tensor, Tensor]
    sent: int = 0

    def __call__(self) -> None:
        before = LEDGER.total()
        self.optimizer.zero_grad()
        loss_of(self.model(self.batch[0]), self.batch[1]).backward()
        self.sync()
        self.optimizer.step()
        self.sent = (LEDGER.total() - before).bytes_sent


@functools.cache
def model_as_made() -> GPT:
    """Return the initial model, which takes longer to make than to copy."""
    return GPT(CONFIG)


def start(cluster: Cluster, name: str, by_comm: bool = False, module: GPT | None = None) -> Training:
    """Return the training of a variant: "naive", "bucket_overlap", "zero1", "zero2", "zero3" or "fsdp2".

    `by_comm` makes "fsdp2" send through comm.
    """
    module, batch = module or copy.deepcopy(model_as_made()), text(WINDOWS)
    if name in ("zero1", "zero2"):
        sharded = ZeroOptimizer if name == "zero1" else ZeroGradientOptimizer
        optimizer = sharded(module.parameters(), AdamW, pattern="pipelined_ring", bucket_mb=CAP_MB, **OPTIONS)
        return Training(module, optimizer, optimizer.finish_gradient_sync, batch)
    if name == "fsdp2":
        model = train_fsdp.shard(module, cluster.device) if by_comm else plain_fsdp2(cluster, module)
        return Training(model, AdamW(model.parameters(), **OPTIONS), lambda: None, batch)
    if name == "bucket_overlap":
        model = BucketDataParallel(module, pattern="pipelined_ring", bucket_mb=CAP_MB)
    else:
        model = {"naive": NaiveDataParallel, "zero3": FullyShardedDataParallel}[name](
            module, pattern="pipelined_ring"
        )
    return Training(model, AdamW(model.parameters(), **OPTIONS), model.finish_gradient_sync, batch)


def plain_fsdp2(cluster: Cluster, module: GPT) -> nn.Module:
    """Return the model with unchanged FSDP2, sharded by block."""
    mesh = init_device_mesh(cluster.device.type, (cluster.world_size,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def alternate(
    cluster: Cluster, plan: list[Turns], warmup: int = 2
) -> tuple[list[dict[str, list[float]]], list[dict[str, int]]]:
    """Return each step's seconds and the last step's bytes on this rank, for each link of the plan.

    Both are by variant. On slow links `fsdp2` sends through comm, because only comm can be slowed down.
    """
    trainings: dict[tuple[str, bool], Training] = {}
    seconds, sent = [], []
    for link, names, runs in plan:
        slow = None if link == "loopback" else slow_link.parse(link)
        keys = {name: (name, name == "fsdp2" and slow is not None) for name in names}
        new = {key: start(cluster, *key) for key in keys.values() if key not in trainings}
        side_by_side.alternate({str(key): new[key] for key in new}, runs=0, warmup=1 if trainings else warmup)
        trainings |= new
        variants = {name: trainings[key] for name, key in keys.items()}
        seconds.append(side_by_side.alternate(variants, runs, slow, warmup=0))
        sent.append({name: training.sent for name, training in variants.items()})
    return seconds, sent


def peak(cluster: Cluster, name: str) -> tuple[int, int]:
    """Return the peak memory of this process in a step, and its memory before the model was made."""
    # glibc keeps freed memory unless it is a mapping of its own, which would hide what a step needs.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    meter.reset_peak_memory(cluster.device)
    before = meter.peak_memory(cluster.device)
    training = start(cluster, name, module=GPT(CONFIG))  # a model without other references
    training()  # after this step there is optimizer state
    meter.reset_peak_memory(cluster.device)
    training()
    return meter.peak_memory(cluster.device), before


def held(cluster: Cluster, names: list[str]) -> dict[str, Held]:
    """Return the bytes of tensors after a step, by variant."""
    result = {}
    for name in names:
        training = start(cluster, name)
        training()
        measured = MemoryReport(training.model, training.optimizer).measure()
        result[name] = Held(measured.parameters, measured.gradients, measured.optimizer_state)
    return result


def zero3_at_its_peak(cluster: Cluster) -> tuple[int, int]:
    """Return stage 3's peak bytes in a step of two microbatches: lasting tensors, and all tensors.

    Lasting tensors are gradient shards, optimizer state and parameters, also gathered ones. All tensors
    include those that are being sent. Bytes are counted when a block's forward begins and when a gradient is
    ready. The second microbatch runs beside the gradient shards of the first.
    """
    gc.collect()
    gc.freeze()  # earlier objects do not count, and need not be searched each time
    module = GPT(CONFIG)
    x, y = (tokens[:, :4] for tokens in text(1))  # few activations
    seen: list[tuple[int, int]] = []

    def look(*_: Any) -> None:
        sizes = live_bytes(
            {
                "data": (x, y),
                "parameters": [tensor for unit in model.units for tensor in (unit.shard, unit.full)],
                "gradients": [shard.grad for shard in model.parameters()],
                "optimizer_state": [t for state in optimizer.state.values() for t in state.values()],
            }
        )
        lasting = sizes["parameters"] + sizes["gradients"] + sizes["optimizer_state"]
        seen.append((lasting, lasting + sizes["other"]))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    model = FullyShardedDataParallel(module, pattern="pipelined_ring")
    for block in module.blocks:
        block.register_forward_pre_hook(look)  # after the wrapper's hook has gathered the block
    optimizer = AdamW(model.parameters(), **OPTIONS)
    for _ in range(2):
        seen.clear()  # only the second step counts: it has optimizer state
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model(x), y).backward()
        loss_of(model(x), y).backward()
        model.finish_gradient_sync()
        optimizer.step()
        look()
    lasting, everything = (max(column) for column in zip(*seen, strict=True))
    return lasting, everything
