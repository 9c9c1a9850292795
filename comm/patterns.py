"""List the patterns of each collective. The first one is what a group that uses gloo takes by default."""

from types import ModuleType

from comm.algorithms import (
    bruck,
    hierarchical,
    hypercube,
    in_place,
    pairwise,
    pipelined_ring,
    ring,
    sharded_tree,
    star,
    tree,
)

RINGS = ("ring", "pipelined_ring")
PATTERNS = {
    "broadcast": ("tree", "flat"),
    "scatter": ("flat", "tree"),
    "gather": ("flat", "tree"),
    "reduce": ("tree", "flat", "pairwise"),
    "all_gather": (*RINGS, "tree", "pairwise", "bruck"),
    "reduce_scatter": (*RINGS, "tree", "pairwise"),
    "all_reduce": (
        *(*RINGS, "tree", "flat", "recursive_doubling", "halving_doubling"),
        *("pairwise", "hierarchical"),
    ),
    "all_to_all": ("pairwise", "bruck"),
    "barrier": ("tree",),
}

FILES: dict[str, ModuleType] = {  # each has an all_gather, and all but bruck have a reduce_scatter
    "pipelined_ring": pipelined_ring,
    "ring": ring,
    "tree": sharded_tree,
    "pairwise": pairwise,
    "bruck": bruck,
}
ALL_REDUCES = {  # the functions are looked up when they are called, because an exercise may replace them
    "pipelined_ring": (pipelined_ring, "all_reduce"),
    "ring": (ring, "all_reduce"),
    "tree": (tree, "all_reduce"),
    "flat": (star, "all_reduce"),
    "recursive_doubling": (hypercube, "recursive_doubling"),
    "halving_doubling": (hypercube, "halving_doubling"),
    "pairwise": (pairwise, "all_reduce"),
    "hierarchical": (hierarchical, "all_reduce"),
    "in_place": (in_place, "all_reduce"),
}
