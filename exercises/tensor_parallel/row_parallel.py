"""The row-parallel layer. Write `RowParallelLinear.forward` of tensor_parallel/layers.py.

Check it with `python -m exercises check row_parallel`.
"""

import torch.nn.functional as F
from torch import Tensor

from comm.functions import scatter_sums, split_to_ranks, sum_over_ranks
from tensor_parallel.layers import TIME


def forward(self, x: Tensor) -> Tensor:
    """Return the layer's full output from this rank's n-th of the inputs.

    With `self.split_input` x has all inputs: `split_to_ranks` takes this rank's n-th of dim -1. With
    `self.sequence_parallel` a rank gets the output for its tokens only, which are divided along
    TIME: `scatter_sums` reduces and scatters. Otherwise every rank gets the output for all tokens:
    `sum_over_ranks`. `self.bias` may be None.
    """
    raise NotImplementedError(
        "The row-parallel layer is not written yet: `RowParallelLinear.forward` has no body."
    )
