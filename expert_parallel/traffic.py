"""Compute by formula what a rank sends in a step of a GPT with experts.

In a layer this rank sends s tokens to *other* ranks, and u tokens come from them. A token has d numbers of b
bytes, and there are E experts.

      counts         an all-gather of E numbers of 8 bytes
      forward        dispatch s d b, combine u d b
      backward       combine s d b, dispatch u d b
      gradients      an all-reduce for all parameters but the experts', and one for these among replicas

The router decides what s and u are, so the formula takes them from the counts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm.collectives import Group
from comm.cost import expected_traffic, pairwise_traffic
from expert_parallel.config import ExpertGroups
from lab.trace.ledger import Traffic


def exchange_traffic(sent_rr: Tensor, width: int, itemsize: int, group: Group) -> Traffic:
    """Return what this rank sends if rank p sends `sent_rr[p, q]` tokens to rank q in an all-to-all."""
    rank = dist.get_rank(group)
    return pairwise_traffic((sent_rr[rank] * width).tolist(), itemsize, rank)


def tokens_between(sent_rE: Tensor, groups: ExpertGroups) -> Tensor:
    """Return how many tokens each rank of this expert group sends to each, from the counts of all ranks."""
    return sent_rE[groups.members].view(groups.num_expert_ranks, groups.num_expert_ranks, -1).sum(2)


def counts_traffic(sent_rE: Tensor, groups: ExpertGroups) -> Traffic:
    """Return what this rank sends in the all-gather that tells all ranks the counts of a layer."""
    return expected_traffic("all_gather", None, sent_rE.numel(), sent_rE.itemsize, groups.everyone)


def tokens_traffic(sent_rE: Tensor, width: int, itemsize: int, groups: ExpertGroups) -> Traffic:
    """Return what this rank sends in a layer's forward; a backward sends as much."""
    there = tokens_between(sent_rE, groups)
    both = (exchange_traffic(sent_rr, width, itemsize, groups.experts) for sent_rr in (there, there.T))
    return sum(both, Traffic())


def layer_traffic(sent_rE: Tensor, width: int, itemsize: int, groups: ExpertGroups) -> Traffic:
    """Return what this rank sends in a layer's forward and backward."""
    once = tokens_traffic(sent_rE, width, itemsize, groups)
    return counts_traffic(sent_rE, groups) + once + once


def router_figures(model: Any) -> dict[str, Any]:
    """Return what the routers of all ranks have decided in the last step; the bytes are this rank's."""
    chosen_bE = torch.stack([layer.chosen_rE.sum(0) for layer in model.layers])
    sent_bE = torch.stack([layer.sent_rE.sum(0) for layer in model.layers])
    imbalance = chosen_bE.max(1).values / chosen_bE.double().mean(1)
    rank, tokens = model.groups.rank, 0  # to other ranks, and from them to be sent back
    for between in (tokens_between(layer.sent_rE, model.groups) for layer in model.layers):
        tokens += int(between[rank].sum() + between[:, rank].sum() - 2 * between[rank, rank])
    dropped = int((chosen_bE - sent_bE).sum())
    return {
        "rows": {"experts": experts_row(float(imbalance.max()), dropped)},
        "least_balanced_block": int(imbalance.argmax()),
        "tokens_per_expert": chosen_bE[imbalance.argmax()].tolist(),
        "imbalance": round(float(imbalance.max()), 3),
        "dropped_tokens": dropped,
        "dispatch_bytes": 2 * tokens * model.module.config.width * model.dense[0].element_size(),
    }


def experts_row(imbalance: float, dropped: int) -> str:
    """Return the row of a report that says how busy experts were."""
    return f"the busiest one got {imbalance:.2f} times its share; {dropped:,} tokens were dropped"
