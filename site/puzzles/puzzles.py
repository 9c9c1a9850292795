"""The puzzles: who has which layer at the start, the budget, and the fewest steps that we know of.

A rank holds a layer as "full" (weights and optimizer state), "split" (full weights, a shard of the state) or
"shard" (a shard of both).
"""

from typing import Any

SIZES = {"weight": 2, "activation": 1, "state": 4}
STATELESS = SIZES | {"state": 0}


def puzzle(name: str, title: str, text: str, holds: list[dict[str, str]], **given: Any) -> dict[str, Any]:
    """Return a puzzle as page.js and rules.js read it."""
    microbatches = list(given.pop("microbatches"))
    steps, memory = given.pop("budget")
    layers = 1 + max(int(layer) for held in holds for layer in held)
    return {
        "name": name, "title": title, "text": text, "ranks": len(holds), "layers": layers, "holds": holds,
        "microbatches": microbatches, "budget": {"steps": steps, "memory": memory},
        "sizes": SIZES, "fewest": steps, **given,
    }  # fmt: skip


def everywhere(ranks: int, layers: int, kind: str) -> list[dict[str, str]]:
    """Return what ranks hold that have all layers."""
    return [{str(layer): kind for layer in range(layers)} for _ in range(ranks)]


PUZZLES = [
    puzzle(
        "one_step",
        "One training step",
        "One rank has two layers. Load microbatch a, run it forward and backward, and update both layers.",
        everywhere(1, 2, "full"),
        microbatches="a",
        budget=(7, 10),
        sizes=STATELESS,
    ),
    puzzle(
        "accumulate",
        "Two microbatches",
        "A step now uses two microbatches, whose gradients add up. There is no room for all"
        " activations of both: run the backward of one before the forward of the other. Load the second"
        " one in time, so that no step is lost.",
        everywhere(1, 2, "full"),
        microbatches="ab",
        budget=(11, 12),
        sizes=STATELESS,
    ),
    puzzle(
        "recompute",
        "Recompute",
        "Four layers, and no room for all activations. What you free, you can load or compute again"
        " when the backward needs it. A layer can be updated as soon as its gradient is complete.",
        everywhere(1, 4, "full"),
        microbatches="a",
        budget=(14, 14),
        sizes=STATELESS,
    ),
    puzzle(
        "data_parallel",
        "Two replicas",
        "Data parallel: both ranks have the full model, and each takes one microbatch. Every rank"
        " needs the gradient of both. An all-reduce is a reduce-scatter of g and then an all-gather of"
        " g.",
        everywhere(2, 2, "full"),
        microbatches="ab",
        budget=(10, 19),
        fewest=9,
    ),
    puzzle(
        "overlap",
        "Communicate while you compute",
        "Three layers, and no step to lose: the link works while the backward still computes. The"
        " gradient of the last layer is complete first.",
        everywhere(2, 3, "full"),
        microbatches="ab",
        budget=(12, 27),
    ),
    puzzle(
        "zero1",
        "Divide the optimizer state",
        "ZeRO: each rank has the state of one half of every layer, and so needs only its shard of the"
        " gradient. It updates its shard of the weights, and an all-gather of w brings the other half."
        " This saves memory, and sends no more than an all-reduce.",
        everywhere(2, 2, "split"),
        microbatches="ab",
        budget=(8, 14),
    ),
    puzzle(
        "zero3",
        "Divide the weights",
        "Fully sharded: a rank begins with shards of all three layers and ends with updated shards."
        " Gather a layer before you use it, and free it where memory is short. The replicas of data"
        " parallel would need 27.",
        everywhere(2, 3, "shard"),
        microbatches="ab",
        budget=(13, 17),
    ),
    puzzle(
        "pipeline",
        "Two stages",
        "A pipeline: rank 0 has layer 0, rank 1 has layer 1. Send activations forward and gradients"
        " back. While rank 1 works on one microbatch, rank 0 can work on another.",
        [{"0": "full"}, {"1": "full"}],
        microbatches="abcd",
        budget=(16, 17),
        fewest=14,
    ),
    puzzle(
        "one_f_one_b",
        "Two stages, less memory",
        "The same pipeline with less memory and fewer steps. If rank 1 runs one forward and one"
        " backward in turn (1F1B), no rank has to hold the activations of all four microbatches.",
        [{"0": "full"}, {"1": "full"}],
        microbatches="abcd",
        budget=(14, 14),
    ),
    puzzle(
        "sharded_stages",
        "Two stages, each divided between two ranks",
        "Everything at once: ranks 0 and 1 share the first two layers, ranks 2 and 3 the last two. A"
        " stage is fully sharded between its two ranks, and each of them works on two of the four"
        " microbatches.",
        [{"0": "shard", "1": "shard"}] * 2 + [{"2": "shard", "3": "shard"}] * 2,
        microbatches="abcd",
        budget=(18, 16),
    ),
]
