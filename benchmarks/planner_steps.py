"""Run the ranks' part of benchmarks/planner.py: calibrate the machine, and train as a plan says."""

import ctypes
import dataclasses
import gc
import time
from collections.abc import Callable

import torch

from benchmarks.side_by_side import timed
from comm.cost import Link
from comm.wire import slow_link
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.planner.auto import measured_machine
from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.launch.allocator import keep_freed_memory
from lab.models.model import GPT, MLP, GPTConfig, MLPConfig
from lab.trace import meter
from lab.trace.memory import resident_bytes

Config = GPTConfig | MLPConfig


@dataclasses.dataclass(frozen=True)
class Measured:
    """Holds what a rank measured of a plan: seconds of each step, and bytes at the peak of one.

    `above_base` is without Python, torch and what a tiny model leaves behind.
    """

    seconds: list[float]
    core_seconds: list[float]
    peak: int
    above_base: int


def calibrate(cluster: Cluster, link: Link) -> Machine:
    """Return the machine as `sharding_strategy: auto` measures it."""
    return measured_machine(cluster, link)


def measure(
    cluster: Cluster, sizes: ParallelSizes, config: Config, batch: int, link: Link, steps: int
) -> Measured:
    """Train as `sizes` says. Memory is measured in a step without the link, and time afterwards with it."""
    # glibc keeps freed memory unless it is a mapping of its own, which would hide what a step needs.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    mesh = Mesh(cluster, sizes)
    training(mesh, tiny(config), batch)()  # code is loaded, and connections are made
    gc.collect()
    base = resident_bytes()
    step = training(mesh, config, batch)
    step()  # the first one chooses the buckets, and ends with the optimizer's state
    gc.collect()
    meter.reset_peak_memory(cluster.device)
    step()
    peak = meter.peak_memory(cluster.device) or 0
    keep_freed_memory()
    step()
    seconds, cores = [], []
    with slow_link.slowed(link):
        for _ in range(steps):
            before = time.process_time()
            seconds.append(timed(step))
            cores.append(time.process_time() - before)
    return Measured(seconds, cores, peak, peak - base)


def screen(cluster: Cluster, sizes: ParallelSizes, config: Config, batch: int, link: Link) -> float:
    """Return the seconds of a plan's second step: enough to tell which plans deserve `measure`."""
    keep_freed_memory()
    step = training(Mesh(cluster, sizes), config, batch)
    step()
    with slow_link.slowed(link):
        return timed(step)


def training(mesh: Mesh, config: Config, batch: int) -> Callable[[], None]:
    """Return a step of a new model on the mesh."""
    rows = batch // mesh.sizes.data
    model: GPT | MLP
    if isinstance(config, GPTConfig):
        tokens = torch.randint(config.vocab_size, (rows, config.block_size + 1))
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        model = GPT(config)
    else:
        x, y = torch.randn(rows, config.inputs), torch.randint(config.outputs, (rows,))
        model = MLP(config.sizes)
    hybrid = HybridParallel(model, mesh, x[: rows // mesh.sizes.microbatches], lr=1e-3)

    def step() -> None:
        hybrid.optimizer.zero_grad()
        hybrid.backward(x, y)
        hybrid.optimizer.step()

    return step


def tiny(config: Config) -> Config:
    """Return a model of the same layers that holds almost nothing."""
    if isinstance(config, GPTConfig):
        return dataclasses.replace(config, width=8 * config.num_heads, block_size=16)
    return dataclasses.replace(config, width=16)
