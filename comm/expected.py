"""Name comm.cost.expected_traffic as it was called before."""

from comm.cost import expected_traffic as expected

__all__ = ["expected"]
