"""Report how busy the experts of a mesh were in the last step, as lesson 7 does for its ranks.

      stage 0   blocks 0 1   tokens of all replicas for each expert ─┐
                                                                     ├─► least balanced block, dropped tokens
      stage 1   blocks 2 3   tokens of all replicas for each expert ─┘

All replicas of a stage know the counts of all of them, and tensor ranks have equal counts. So one rank of
each stage counts.
"""

import torch

from comm.exchange import exchange
from hybrid_parallel.expert_axis import layers_of
from hybrid_parallel.hybrid import HybridParallel


def expert_figures(hybrid: HybridParallel) -> dict[str, float]:
    """Return the report's rows on experts, for the last step. All ranks must call it.

    `imbalance` is the tokens of the busiest expert / their mean, in the least balanced block.
    `dropped_tokens` counts, over all blocks and replicas, how often a token was not sent to an expert that it
    had chosen.
    """
    layers = layers_of(hybrid.module)
    chosen_bE = [torch.stack(layer.chosen).sum((0, 1)).tolist() for layer in layers]
    dropped = sum(int((torch.stack(layer.chosen) - torch.stack(layer.sent)).sum()) for layer in layers)
    counts = all(hybrid.mesh.coordinate(axis) == 0 for axis in ("data", "context", "tensor"))
    of_stages = [stage for stage in exchange((chosen_bE, dropped) if counts else ()) if stage]
    blocks = [chosen_E for of_stage, _ in of_stages for chosen_E in of_stage]
    forwards = 1 + hybrid.sizes.recompute  # of each microbatch
    return {
        "imbalance": round(max(len(chosen_E) * max(chosen_E) / sum(chosen_E) for chosen_E in blocks), 3),
        "dropped_tokens": sum(dropped for _, dropped in of_stages) // forwards,
    }
