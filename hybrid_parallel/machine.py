"""Describe the devices that train a model: memory, rates of computing, and the links between them.

No program reaches a rate of a data sheet. So a device has the share of each rate that its kernels reach, one
number for all models and plans:

    matmul       matrix products. H100: measured with torch 2.11 on one of 700 W, for 4 seconds with each
                 matrix of a Llama 3 layer: 650 to 700 of 989 teraFLOP/s, as the clock sinks under load.
                 A100: chosen, together with `overhead`.
    attention    the fused kernel. H100: measured there with scaled_dot_product_attention and 8192 tokens,
                 507 teraFLOP/s forward and 360 backward. A100: the same share.
    bandwidth    operations on each element. H100: measured there, 2.8 to 3.0 of 3.35 TB/s in additions and
                 activation functions, 1.8 in norms. A100: the same share.
    overhead     of a step is in no formula: gaps between kernels, stragglers, reading data. Chosen.
    links        a collective reaches four fifths of a link's rate, on all devices. Chosen.

The chosen numbers are round, and were set once with the runs that tests/hybrid_parallel/published_runs.py
calls MEGATRON and LLAMA. Peak rates, memory and bandwidths are those of NVIDIA's data sheets, for SXM and
without sparsity.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from comm.cost import Link
from lab.errors import WorkbookError

Precision = Literal["float32", "bf16"]
MATMULS = ((512, 512, 2048), (512, 2048, 512))  # rows, inner and columns of a small GPT's layer


@dataclass(frozen=True)
class Device:
    """Holds the memory of one device in bytes, and its rates in operations and in bytes per second."""

    name: str
    memory_bytes: float
    peak_flops: dict[str, float]  # by precision
    bandwidth: float
    matmul_share: float
    attention_share: float
    bandwidth_share: float
    overhead: float

    def flops(self, precision: Precision) -> float:
        """Return the operations per second that matrix products reach."""
        return self.peak_flops[precision] * self.matmul_share

    def attention_flops(self, precision: Precision) -> float:
        """Return the operations per second that attention reaches."""
        return self.peak_flops[precision] * self.attention_share

    @property
    def bytes_per_second(self) -> float:
        """Return the bytes that operations on each element read and write per second."""
        return self.bandwidth * self.bandwidth_share


@dataclass(frozen=True)
class Machine:
    """Holds a device, the number of them in a node, and the links of each device within and between nodes."""

    device: Device
    devices_per_node: int
    inner: Link
    outer: Link

    def link(self, ranks: int, stride: int) -> Link:
        """Return the link of `ranks` devices whose numbers are `stride` apart, as in one group of a mesh.

        Within a node it is the inner link. Across nodes a ring leaves each node once, and several devices of
        the group in a node share their network cards: NCCL runs a ring through each card.
        """
        if (ranks - 1) * stride < self.devices_per_node:
            return self.inner
        cards = max(1, min(ranks, self.devices_per_node // stride))
        return Link(self.outer.alpha, max(self.inner.beta, self.outer.beta / cards))


LINK_SHARE = 0.8  # of a link's rate, that a collective reaches
OVERHEAD = 0.07  # of a step, on all GPUs

A100_FLOPS = {"float32": 156e12, "bf16": 312e12}  # float32 as TF32
H100_FLOPS = {"float32": 494e12, "bf16": 989e12}
DEVICES = {
    "a100-40gb": Device("a100-40gb", 40 * 2**30, A100_FLOPS, 1.555e12, 0.80, 0.41, 0.85, OVERHEAD),
    "a100-80gb": Device("a100-80gb", 80 * 2**30, A100_FLOPS, 2.039e12, 0.80, 0.41, 0.85, OVERHEAD),
    "h100": Device("h100", 80 * 2**30, H100_FLOPS, 3.35e12, 0.69, 0.41, 0.85, OVERHEAD),
    "h200": Device("h200", 141e9, H100_FLOPS, 4.8e12, 0.69, 0.41, 0.85, OVERHEAD),
}


def _node(device: Device, nvlink: float, network: float) -> Machine:
    """Return nodes of 8 devices; rates of the links in bytes per second and direction, for each device."""
    return Machine(device, 8, Link(5e-6, 1 / (nvlink * LINK_SHARE)), Link(10e-6, 1 / (network * LINK_SHARE)))


# NVLink: 600 and 900 GB/s in both directions together. Network: a card of 200 or 400 Gbit/s for each device.
MACHINES = {
    "a100-40gb": _node(DEVICES["a100-40gb"], 300e9, 25e9),
    "a100-80gb": _node(DEVICES["a100-80gb"], 300e9, 25e9),
    "h100": _node(DEVICES["h100"], 450e9, 50e9),
    "h200": _node(DEVICES["h200"], 450e9, 50e9),
}


def machine_of(device: str, devices: int = 1, link: Link | None = None) -> Machine:
    """Return nodes of a named device, or with "this" the machine that this process runs on.

    `devices` is the number of ranks that share this machine, and `link` the link between them; without it
    messages take no time. For named devices `link` replaces the one between nodes.
    """
    if device == "this":
        return this_machine(devices, link or Link(0.0, 0.0))
    if device not in MACHINES:
        raise WorkbookError(
            f"There is no device {device!r}: choose one of {', '.join(MACHINES)}, or this for this machine."
        )
    machine = MACHINES[device]
    return machine if link is None else Machine(machine.device, 8, machine.inner, link)


def this_machine(ranks: int, link: Link) -> Machine:
    """Return this machine, its cores and memory shared by `ranks` processes with one thread each.

    The rates are measured in half a second. A rank gets an even share of the cores when there are more ranks.
    """
    flops, bandwidth = _measured()
    share = min(1.0, len(os.sched_getaffinity(0)) / ranks)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    rates = {"float32": flops * share, "bf16": flops * share}
    return Machine(Device("this", memory, rates, bandwidth * share, 1.0, 1.0, 1.0, 0.0), ranks, link, link)


@cache
def _measured() -> tuple[float, float]:
    """Return this machine's operations and bytes per second, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = sum(2.0 * m * k * n for m, k, n in MATMULS)
        pairs = [(torch.ones(m, k), torch.ones(k, n)) for m, k, n in MATMULS]
        x = torch.ones(4 << 20)
        return flops / _fastest(lambda: [a @ b for a, b in pairs]), 8 * len(x) / _fastest(lambda: x + x)
    finally:
        torch.set_num_threads(threads)


def _fastest(run: Callable[[], object], seconds: float = 0.25) -> float:
    """Return the shortest of the times that `run` takes."""
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
