"""Run the ranks' part of benchmarks/expert_parallel.py: steps of a GPT with experts, and what they send."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks import side_by_side
from comm.wire import slow_link
from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.expected_traffic import traffic_per_step
from expert_parallel.train_moe import ExpertParallel
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus

By = dict[str, list[float]]
CONFIG = GPTConfig(block_size=256, num_layers=2, num_heads=4)
MOE = MoEConfig(num_experts=8, top_k=2)


def steps(
    cluster: Cluster, sizes: Sequence[tuple[int, int]], links: Sequence[str], runs: int
) -> list[tuple[dict[str, int], list[By]]]:
    """Return for each (width, tokens of a rank) the bytes that this rank sends in a step, and the seconds.

    The seconds are those of each step of both variants, for each link. No weight changes between steps, so
    the routers decide the same in all of them, and in both variants.
    """
    variants = {"expert_parallel": form_groups(cluster.world_size), "replicated": form_groups(1)}
    parsed = [None if link == "loopback" else slow_link.parse(link) for link in links]
    corpus, found = load_corpus(), []
    for width, tokens in sizes:
        config = replace(CONFIG, width=width)
        x, y = global_batch(corpus, cluster.rank, 0, tokens // config.block_size, config.block_size)
        models = {name: ExpertParallel(GPT(config), MOE, groups) for name, groups in variants.items()}

        def step(model: ExpertParallel, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            model.zero_grad()
            loss_of(model(x), y).backward()
            model.finish_gradient_sync()

        calls = {name: lambda model=model, step=step: step(model) for name, model in models.items()}
        seconds = [side_by_side.alternate(calls, runs, link, warmup=1) for link in parsed]
        sent = {name: traffic_per_step(model).bytes_sent for name, model in models.items()}
        found.append((sent, seconds))
    return found
