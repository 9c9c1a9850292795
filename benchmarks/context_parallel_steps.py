"""Run the ranks' part of benchmarks/context_parallel.py: attention by a clock, steps, activations."""

import time
from collections.abc import Callable
from collections.abc import Sequence as List

import torch
from torch import Tensor

from benchmarks import side_by_side
from comm import collectives
from comm.wire import slow_link
from context_parallel.clock import clock
from context_parallel.parallel_model import ContextParallel, SharedSequence
from context_parallel.sequence_cut import CUTS, SequenceCut
from context_parallel.train_all_to_all_attention import all_to_all_attention
from context_parallel.train_ring_attention import ring_attention
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.trace.ledger import LEDGER
from lab.trace.memory import saved_activations
from tensor_parallel.parallelize import parallelize

By = dict[str, list[float]]


def text(length: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (batch, length + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def clocked(cluster: Cluster, cut: str, length: int, seconds: float, heads: int, link: str, runs: int) -> By:
    """Return the seconds of ring attention, forward and backward, where a clock replaces computing."""
    sequence = SharedSequence(None, CUTS[cut](length, cluster.world_size), clock(seconds, length))
    own = sequence.cut.length(cluster.rank)
    q, k, v = (torch.zeros(1, heads, own, 64, requires_grad=True) for _ in range(3))
    spent = []
    for run in range(1 + runs):
        with slow_link.slowed(None if link == "loopback" or not run else slow_link.parse(link)):
            collectives.barrier()
            start = time.perf_counter()
            ring_attention(q, k, v, sequence).sum().backward()
            spent.append(time.perf_counter() - start)
    return {"ring": spent[1:]}


def steps(
    cluster: Cluster, config: GPTConfig, links: List[str], runs: int
) -> tuple[list[By], dict[str, int]]:
    """Return the seconds of each step of each technique on this rank, for each link, and the bytes of a step.

    A step has one sequence of `config.block_size` tokens.
    """
    x, y = text(config.block_size)
    ring = ContextParallel(GPT(config), ring_attention)
    exchange = ContextParallel(GPT(config), all_to_all_attention, SequenceCut.contiguous)
    sequence = parallelize(GPT(config), sequence_parallel=True)

    def step(model: ContextParallel) -> None:
        model.zero_grad()
        model.loss(model(x), y).backward()
        model.finish_gradient_sync()

    variants = {
        "ring": lambda: step(ring),
        "all_to_all": lambda: step(exchange),
        "sequence_parallel": lambda: step(sequence),
    }
    sent = {name: bytes_sent_in(variant) for name, variant in variants.items()}
    parsed = [None if link == "loopback" else slow_link.parse(link) for link in links]
    return [side_by_side.alternate(variants, runs, link, warmup=1) for link in parsed], sent


def bytes_sent_in(step: Callable[[], None]) -> int:
    """Return the bytes that this rank sends in a step; the first one is not counted."""
    step()
    before = LEDGER.total()
    step()
    return (LEDGER.total() - before).bytes_sent


def activations(cluster: Cluster, config: GPTConfig, length: int) -> dict[str, int]:
    """Return the bytes that autograd keeps on this rank for the backward of one sequence."""
    x, y = text(length)
    attentions = {"ring": (ring_attention, SequenceCut.zigzag)}
    attentions["all_to_all"] = all_to_all_attention, SequenceCut.contiguous
    found = {}
    for name, how in attentions.items():
        model = ContextParallel(GPT(config), *how)
        with saved_activations(model.parameters) as saved:
            model.loss(model(x), y)
        found[name] = saved.bytes
    if cluster.world_size == 1:
        plain = GPT(config)
        with saved_activations(plain.parameters) as saved:
            loss_of(plain(x), y)
        found["plain"] = saved.bytes
    return found
