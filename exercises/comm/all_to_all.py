"""All-to-all. Write `all_to_all` of comm/algorithms/pairwise.py.

Check it with `python -m exercises check all_to_all`.
"""

import torch

from comm.transport.wire import Wire


def all_to_all(
    wire: Wire, output: torch.Tensor, full: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
) -> None:
    """Send part p of `full` to rank p, and receive part p of `output` from it.

    The parts stand one after the other. `in_sizes[p]` is the number of elements of part p of `full`,
    and `out_sizes[p]` that of part p of `output`. An empty part is not sent.
    """
    raise NotImplementedError("All-to-all is not written yet: `all_to_all` has no body.")
