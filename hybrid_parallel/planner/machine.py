"""Describe the devices that train a model: memory, rates of computing, and the links between them.

No program reaches the rates of a data sheet. So for each rate a device has the share that its kernels reach,
one number for all models and plans:

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
from dataclasses import dataclass
from typing import Literal

from comm.cost import Link
from hybrid_parallel.planner.measured import NO_HANDLING, Handling, measure_rates
from lab.launch.errors import WorkbookError
from lab.launch.threads import own_cores
from lab.trace.memory import resident_bytes

Precision = Literal["float32", "bf16"]


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
    layer_seconds: float = 0.0  # added to each forward of a layer: the time to call its kernels

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
    """Holds a device, the number of them in a node, and the links of each device within and between nodes.

    On a machine without accelerators the devices are processes that share `cores`; a device's rates are then
    those of a core. `handling` is the time of a core that collectives take on a rank. `hides_reductions` says
    whether column-parallel layers hide their collectives in the backward, as tensor_parallel/overlapped.py
    does; the programs of the published runs on GPUs did not. `gathers_keys` says whether the ranks of the
    context axis gather all keys and values before their attention begins, as the program of Llama 3 did. This
    workbook does what `attention` of the sizes says. `autocast` says whether bf16 is only the type in which
    the model computes, as in this workbook; Megatron-LM has its parameters and gradients in bf16, too.
    """

    device: Device
    devices_per_node: int
    inner: Link
    outer: Link
    cores: int | None = None
    handling: Handling = NO_HANDLING
    hides_reductions: bool = False
    autocast: bool = False
    gathers_keys: bool = False

    @property
    def share(self) -> float:
        """Return the part of a core or of a device that a rank has while all ranks compute."""
        return 1.0 if self.cores is None else min(1.0, self.cores / self.devices_per_node)

    def link(self, ranks: int, stride: int) -> Link:
        """Return the link of `ranks` devices whose numbers are `stride` apart, as in one group of a mesh.

        Within a node it is the inner link. Across nodes a ring leaves each node only once, but NCCL runs a
        ring through each network card, so the group has the cards of all its devices in a node together.
        """
        if (ranks - 1) * stride < self.devices_per_node:
            return self.inner
        cards = max(1, min(ranks, self.devices_per_node // stride))
        return Link(self.outer.alpha, max(self.inner.beta, self.outer.beta / cards))

    def message_link(self, ranks: int, stride: int) -> Link:
        """Return the link of the slowest message if each of `ranks` devices sends one to the next one.

        A message between two nodes goes through one network card.
        """
        return self.inner if (ranks - 1) * stride < self.devices_per_node else self.outer

    def pairwise_link(self, ranks: int, stride: int) -> Link:
        """Return the mean link of a device's messages in an all-to-all with `ranks` - 1 others.

        What is for devices of other nodes goes through the device's own network card.
        """
        if (ranks - 1) * stride < self.devices_per_node:
            return self.inner
        near = max(1, min(ranks, self.devices_per_node // stride)) - 1
        beta = (near * self.inner.beta + (ranks - 1 - near) * self.outer.beta) / (ranks - 1)
        return Link(self.outer.alpha, beta)


LINK_SHARE = 0.8  # of a link's rate: what a collective reaches
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
    """Return nodes of 8 devices. The rates of the links are for each device, in bytes/s in one direction."""
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


def this_machine(ranks: int, link: Link, handling: Handling = NO_HANDLING) -> Machine:
    """Return this machine, its cores and memory shared by `ranks` processes with one thread each.

    The rates are those of a core. Measuring them takes about a second (measured.py).
    """
    rates = measure_rates()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    peak = {"float32": rates.flops, "bf16": rates.flops}
    attention = rates.attention_flops / rates.flops
    free = max(0.0, memory - resident_bytes())  # a rank holds Python and torch, as this process does
    device = Device("this", free, peak, rates.bandwidth, 1.0, attention, 1.0, 0.0, rates.layer_seconds)
    return Machine(device, ranks, link, link, len(own_cores()), handling, True, True)
