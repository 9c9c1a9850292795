"""Run the ranks' part of benchmarks/data_parallel.py: training steps of each variant, timed."""

import ctypes
import functools
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import side_by_side
from comm import collectives
from comm.wire import slow_link
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_ddp import HookState, through_comm
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.trace import meter, timeline
from lab.trace.metronome import metronome_of
from lab.trace.overlap import overlap_of

CONFIG = GPTConfig.named("13m")
CAP_MB = 4.0
WINDOWS = 2  # windows of text for each rank and step
Step = Callable[[], None]
Turns = tuple[str, list[str], int]  # the link, the variants, and the number of runs of each


def text(windows: int = WINDOWS) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (windows, CONFIG.block_size + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def build(name: str, hooked: bool) -> Step:
    """Return a step of a variant: "naive", "flat", "overlap", "bucket_overlap 4", "ddp" or "ddp 4"."""
    kind, _, cap = name.partition(" ")
    module = GPT(CONFIG)
    model: nn.Module
    if kind == "ddp":
        model = DistributedDataParallel(module, bucket_cap_mb=float(cap) if cap else None)
        if hooked:
            model.register_comm_hook(HookState(), through_comm)
    elif kind == "bucket_overlap":
        model = BucketDataParallel(module, bucket_mb=float(cap))
    else:
        wrappers = {"naive": NaiveDataParallel, "overlap": OverlapDataParallel}
        flat = functools.partial(BucketDataParallel, bucket_mb=math.inf, first_mb=math.inf)
        model = wrappers.get(kind, flat)(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = text()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if kind != "ddp":
            model.finish_gradient_sync()
        optimizer.step()

    return step


def alternate(cluster: Cluster, plan: list[Turns]) -> list[dict[str, list[float]]]:
    """Return the seconds of each step of each variant on this rank, for each link of the plan in turn."""
    steps: dict[tuple[str, bool], Step] = {}
    seconds = []
    for link, names, runs in plan:
        slow = None if link == "loopback" else slow_link.parse(link)
        keys = [(name, slow is not None) for name in names]
        new = {key: build(*key) for key in keys if key not in steps}
        steps |= new
        variants = {key[0]: steps[key] for key in keys}
        seconds.append(side_by_side.alternate(variants, runs, slow, warmup=2 if new else 0))
    return seconds


def metronome(cluster: Cluster, link: str, tick: float, runs: int) -> tuple[list[float], float]:
    """Return the seconds of each step with a clock instead of compute, and the seconds of the ideal step."""
    module = metronome_of(GPT(CONFIG), tick)
    model = BucketDataParallel(module, bucket_mb=1.0)
    x, y = text(1)
    on_wire = sum(p.nbytes for p in model.trained)
    slow = slow_link.parse(link)
    wire = 2 * (cluster.world_size - 1) / cluster.world_size * on_wire * slow.beta

    def step() -> None:
        for parameter in model.trained:
            parameter.grad = None
        loss_of(model(x), y).backward()
        model.finish_gradient_sync()

    [seconds] = side_by_side.alternate({"metronome": step}, runs, slow).values()
    return seconds, module.forward_seconds + module.last_layer_backward_seconds + wire


def hidden(cluster: Cluster, link: str, windows: int, runs: int) -> tuple[float, float, float]:
    """Return the median seconds of compute, of communication, and of hidden communication in a step."""
    module = GPT(CONFIG)
    model = BucketDataParallel(module, bucket_mb=CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = text(windows)
    seen = []
    for run in range(2 + runs):
        with slow_link.slowed(slow_link.parse(link) if run >= 2 else None):
            collectives.barrier()
            timeline.start_recording()
            optimizer.zero_grad()
            with timeline.span("forward", "forward"):
                loss = loss_of(model(x), y)
            with timeline.span("backward", "backward"):
                loss.backward()
            model.finish_gradient_sync()
            with timeline.span("step", "optimizer"):
                optimizer.step()
            timeline.stop_recording()
        seen.append(overlap_of(timeline.recorded()))
    columns = ("compute_seconds", "communication_seconds", "hidden_seconds")
    compute, communication, both = (
        statistics.median(getattr(one, column) for one in seen[2:]) for column in columns
    )
    return compute, communication, both


def peak(cluster: Cluster, kind: str) -> int:
    """Return this process's peak memory in steps of "bucket_overlap", or of "ddp" with gradient views."""
    # glibc keeps freed memory unless it is a mapping of its own, which would hide what a step needs.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    module = GPT(CONFIG)
    model: nn.Module
    if kind == "ddp":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        model = BucketDataParallel(module, bucket_mb=CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = text(1)
    for step in range(4):
        if step == 2:
            meter.reset_peak_memory(cluster.device)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if kind != "ddp":
            model.finish_gradient_sync()
        optimizer.step()
    return meter.peak_memory(cluster.device)


def ready_times(cluster: Cluster, runs: int = 3) -> tuple[float, float, dict[int, float]]:
    """Time a step without communication, and return three values.

    They are the seconds of forward and backward, those of the optimizer, and for the position of each
    parameter the seconds from the start until its gradient is ready.
    """
    module = GPT(CONFIG)
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    x, y = text()
    moments: list[tuple[int, float]] = []
    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: moments.append((i, time.perf_counter())))
    seen = []
    for _ in range(2 + runs):
        collectives.barrier()
        moments.clear()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(module(x), y).backward()
        computed = time.perf_counter()
        optimizer.step()
        ready = {i: moment - start for i, moment in moments}
        seen.append((computed - start, time.perf_counter() - computed, ready))
    _, _, ready = sorted(seen[2:], key=lambda one: one[0])[runs // 2]
    compute, update = (statistics.median(column) for column in list(zip(*seen[2:], strict=True))[:2])
    return compute, update, ready
