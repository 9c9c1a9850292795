"""Describe the devices that train a model: memory, rates of computing, and the links between them.

"this" is the machine of this process, whose rates are measured. No program reaches the rates of a data sheet,
so a named device has for each rate the share that its kernels reach, one number for all models and plans:

    matmul       matrix products. H100: measured with torch 2.11 on one of 700 W, for 4 seconds with each
                 matrix of a Llama 3 layer: 650 to 700 of 989 teraFLOP/s, because the clock slows under load.
                 A100: chosen, together with `overhead`.
    attention    the fused kernel. H100: measured there with scaled_dot_product_attention and 8192 tokens,
                 507 teraFLOP/s forward and 360 backward. A100: the same share.
    bandwidth    operations on each element. H100: measured there, 2.8 to 3.0 of 3.35 TB/s in additions and
                 activation functions, 1.8 in norms. A100: the same share.
    overhead     the share of a step that is in no formula: gaps between kernels, stragglers, reading data.
                 Chosen.
    links        a collective reaches four fifths of a link's rate, on all devices. Chosen.

The chosen numbers are round. They were set once, by comparing predictions with the runs that
tests/hybrid_parallel/published_runs.py calls MEGATRON and LLAMA. Peak rates, memory and bandwidths are those
of NVIDIA's data sheets, for SXM and without sparsity.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F

from comm.cost import Link
from hybrid_parallel.sizes import Precision
from lab.launch.errors import WorkbookError
from lab.launch.threads import own_cores
from lab.trace.memory import resident_bytes


@dataclass(frozen=True)
class Machine:
    """Holds what a device has and reaches, and the links of each one within a node and between nodes.

    Memory is in bytes, `bandwidth` in bytes per second, `peak_flops` in operations per second by precision.
    Without accelerators the devices are processes that share `cores`, and their rates those of a core.
    `autocast` says whether bf16 is only the type in which the model computes, and parameters and gradients
    are float32.
    """

    memory_bytes: float
    peak_flops: dict[str, float]
    matmul_share: float  # of the peak that matrix products reach
    attention_share: float
    bandwidth: float
    overhead: float
    devices_per_node: int
    inner: Link
    outer: Link
    cores: int | None = None
    autocast: bool = False

    def flops(self, precision: Precision) -> float:
        """Return the operations per second that matrix products reach."""
        return self.peak_flops[precision] * self.matmul_share

    def attention_flops(self, precision: Precision) -> float:
        """Return the operations per second that attention reaches."""
        return self.peak_flops[precision] * self.attention_share

    @property
    def share(self) -> float:
        """Return the part of a core or of a device that a rank has while all ranks compute."""
        return 1.0 if self.cores is None else min(1.0, self.cores / self.devices_per_node)

    def is_one_node(self, ranks: int, stride: int) -> bool:
        """Return whether `ranks` devices whose numbers are `stride` apart are in one node."""
        return (ranks - 1) * stride < self.devices_per_node

    def link(self, ranks: int, stride: int) -> Link:
        """Return the link of a ring of `ranks` devices whose numbers are `stride` apart.

        Across nodes a ring leaves each node only once, but NCCL runs a ring through each network card, so the
        group has the cards of all its devices in a node together.
        """
        if self.is_one_node(ranks, stride):
            return self.inner
        cards = max(1, min(ranks, self.devices_per_node // stride))
        return Link(self.outer.alpha, max(self.inner.beta, self.outer.beta / cards))

    def pairwise_link(self, ranks: int, stride: int) -> Link:
        """Return the mean link of a device's messages in an all-to-all with `ranks` - 1 others.

        What is for devices of other nodes goes through the device's own network card.
        """
        if self.is_one_node(ranks, stride):
            return self.inner
        near = max(1, min(ranks, self.devices_per_node // stride)) - 1
        beta = (near * self.inner.beta + (ranks - 1 - near) * self.outer.beta) / (ranks - 1)
        return Link(self.outer.alpha, beta)


A100_FLOPS = {"float32": 156e12, "bf16": 312e12}  # float32 as TF32
H100_FLOPS = {"float32": 494e12, "bf16": 989e12}


def _node(
    memory: float, flops: dict[str, float], matmul: float, bandwidth: float, nvlink: float, network: float
) -> Machine:
    """Return nodes of 8 devices, with the rates of each device's links in bytes/s in one direction."""
    return Machine(
        memory,
        flops,
        matmul,
        attention_share=0.41,
        bandwidth=0.85 * bandwidth,
        overhead=0.07,
        devices_per_node=8,
        inner=Link(5e-6, 1 / (0.8 * nvlink)),
        outer=Link(10e-6, 1 / (0.8 * network)),
    )


# NVLink: 600 and 900 GB/s in both directions together. Network: a card of 200 or 400 Gbit/s for each device.
MACHINES = {
    "a100-40gb": _node(40 * 2**30, A100_FLOPS, 0.80, 1.555e12, 300e9, 25e9),
    "a100-80gb": _node(80 * 2**30, A100_FLOPS, 0.80, 2.039e12, 300e9, 25e9),
    "h100": _node(80 * 2**30, H100_FLOPS, 0.69, 3.35e12, 450e9, 50e9),
    "h200": _node(141e9, H100_FLOPS, 0.69, 4.8e12, 450e9, 50e9),
}


def machine_of(device: str, devices: int = 1, link: Link | None = None) -> Machine:
    """Return nodes of a named device, or with "this" this machine, which `devices` ranks share.

    `link` is the one between nodes or, on this machine, between ranks. None there: messages take no time.
    """
    if device == "this":
        return this_machine(devices, link or Link(0.0, 0.0))
    if device not in MACHINES:
        raise WorkbookError(
            f"There is no device {device!r}: choose one of {', '.join(MACHINES)}, or this for this machine."
        )
    machine = MACHINES[device]
    return machine if link is None else replace(machine, outer=link)


def this_machine(ranks: int, link: Link) -> Machine:
    """Return this machine, its cores and memory shared by `ranks` processes with one thread each."""
    # A rank holds Python and torch, as this process does.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks - resident_bytes()
    flops, attention, bandwidth = measure_rates()
    rates = {"float32": flops, "bf16": flops}, 1.0, attention / flops, bandwidth, 0.0
    return Machine(max(0.0, memory), *rates, ranks, link, link, cores=len(own_cores()), autocast=True)


ROWS, HEADS, TIME, HEAD_WIDTH = 512, 8, 256, 64


@cache
def measure_rates() -> tuple[float, float, float]:
    """Return the operations per second of matrix products and of attention, and the bytes per second, of a
    core of this machine. They come from CPU times, which do not depend on other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        width = HEADS * HEAD_WIDTH
        x, weight, wide = torch.randn(ROWS, width), torch.randn(width, width), torch.randn(ROWS, 4 * width)
        heads = torch.randn(2, HEADS, TIME, HEAD_WIDTH)
        flops = 2 * ROWS * width * width / usual(lambda: F.linear(x, weight))
        # Two products for each pair of a query and a key, half of which the mask leaves.
        scores = 2 * 2 * 2 * HEADS * TIME * TIME * HEAD_WIDTH / 2
        attention = scores / usual(
            lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        )
        return flops, attention, 2 * wide.nbytes / usual(lambda: F.gelu(wide))
    finally:
        torch.set_num_threads(threads)


def usual(call: Callable[[], object]) -> float:
    """Return the median seconds of a call on the thread's CPU clock: the usual speed, not the best one."""
    call()
    seconds = []
    for _ in range(30):
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds)
