"""Name what comm.collectives has, as it was called before."""

from comm.collectives import chosen_pattern, use_pattern

__all__ = ["chosen_pattern", "use_pattern"]
