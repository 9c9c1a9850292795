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
    links        a collective reaches four fifths of a link's rate, on all devices. Chosen. Latencies of a
                 message: 2 microseconds within a node and 32 between nodes, with which the formula of trees
                 (comm/cost.py) is within a fifth of what NCCL took for 8 bytes on 1 to 16 nodes of 8 H100s
                 (the data of the Smol Training Playbook, Hugging Face, 2025).

The chosen numbers are round. They were set once, by comparing predictions with the runs that
tests/hybrid_parallel/published_runs.py calls MEGATRON and LLAMA. Peak rates, memory and bandwidths are those
of NVIDIA's data sheets, for SXM and without sparsity.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from comm.cost import Link
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

    @property
    def share(self) -> float:
        """Return the part of a core or of a device that a rank has while all ranks compute."""
        return 1.0 if self.cores is None else min(1.0, self.cores / self.devices_per_node)

    def link(self, ranks: int, stride: int) -> Link:
        """Return the link of messages among `ranks` devices whose numbers are `stride` apart."""
        return self.inner if (ranks - 1) * stride < self.devices_per_node else self.outer

    def ring_link(self, ranks: int, stride: int) -> Link:
        """Return the link of a collective's ring of `ranks` devices whose numbers are `stride` apart.

        Across nodes a ring leaves each node only once, but NCCL runs a ring through each network card, so the
        group has the cards of all its devices in a node together.
        """
        link, cards = self.link(ranks, stride), max(1, min(ranks, self.devices_per_node // stride))
        return Link(link.alpha, max(self.inner.beta, link.beta / cards))


A100_FLOPS = {"float32": 156e12, "bf16": 312e12}  # float32 as TF32
H100_FLOPS = {"float32": 494e12, "bf16": 989e12}


def _node(
    memory: float, flops: dict[str, float], matmul: float, bandwidth: float, nvlink: float, network: float
) -> Machine:
    """Return nodes of 8 devices, with the rates of each device's links in bytes/s in one direction."""
    inner, outer = Link(2e-6, 1 / (0.8 * nvlink)), Link(32e-6, 1 / (0.8 * network))
    return Machine(memory, flops, matmul, 0.41, 0.85 * bandwidth, 0.07, 8, inner, outer)


# NVLink: 600 and 900 GB/s in both directions together. Network: a card of 200 or 400 Gbit/s for each device.
MACHINES = {
    "a100-40gb": _node(40 * 2**30, A100_FLOPS, 0.80, 1.555e12, 300e9, 25e9),
    "a100-80gb": _node(80 * 2**30, A100_FLOPS, 0.80, 2.039e12, 300e9, 25e9),
    "h100": _node(80 * 2**30, H100_FLOPS, 0.69, 3.35e12, 450e9, 50e9),
    "h200": _node(141e9, H100_FLOPS, 0.69, 4.8e12, 450e9, 50e9),
}


def this_machine(ranks: int, link: Link) -> Machine:
    """Return this machine, its cores and memory shared by `ranks` processes with one thread each."""
    # A rank holds Python and torch, as this process does.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks - resident_bytes()
    flops, attention, bandwidth = measure_rates()
    rates = {"float32": flops, "bf16": flops}, 1.0, attention / flops, bandwidth, 0.0
    return Machine(max(0.0, memory), *rates, ranks, link, link, cores=len(own_cores()), autocast=True)


@cache
def measure_rates() -> tuple[float, float, float]:
    """Return the operations per second of matrix products and of attention, and the bytes per second, of a
    core of this machine. They come from CPU times, which do not depend on other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weight, wide = torch.randn(512, 512), torch.randn(512, 512), torch.randn(512, 2048)
        heads = torch.randn(2, 8, 256, 64)  # examples, heads, tokens, width of a head
        # 2 operations of each product of two numbers. The mask leaves half of the pairs of query and key.
        matmul, scores = 2 * 512**3, 2 * 2 * heads.numel() * 256 / 2
        attend = partial(F.scaled_dot_product_attention, heads, heads, heads, is_causal=True)
        flops, attention = matmul / usual(partial(F.linear, x, weight)), scores / usual(attend)
        return flops, attention, 2 * wide.nbytes / usual(partial(F.gelu, wide))
    finally:
        torch.set_num_threads(threads)


def usual(call: Callable[[], object]) -> float:
    """Return the median seconds of a call on the thread's CPU clock: the usual speed, not the best one."""
    seconds = []
    for _ in range(31):  # the first call is slower
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds)
