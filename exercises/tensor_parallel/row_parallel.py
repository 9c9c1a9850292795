"""The row-parallel layer. Write `RowParallelLinear.forward` of tensor_parallel/layers.py.

Read notebooks/07_tensor_and_sequence_parallel.ipynb first. Do not open tensor_parallel/layers.py yet: it
has the solution.

You may use:

    scatter_sums(x: Tensor, dim: int, group: Group = None) -> Tensor
        Reduce-scatter along `dim` forward, all-gather backward (g-bar of sequence parallelism).
    sum_over_ranks(x: Tensor, group: Group = None) -> Tensor
        All-reduce forward, identity backward (g in Megatron-LM).
    TIME = 1
    self.group: Group, self.weight: nn.Parameter

Check it with `python -m exercises check row_parallel`.
"""

import torch.nn.functional as F
from torch import Tensor

from comm.functions import scatter_sums, sum_over_ranks
from tensor_parallel.layers import TIME


def forward(self, x: Tensor) -> Tensor:
    """Return the layer's full output from this rank's n-th of the inputs.

    With `self.sequence_parallel` a rank gets the output for its tokens only, which are divided along
    TIME, dim 1 of x: `scatter_sums` reduces and scatters. Otherwise every rank gets the output for
    all tokens: `sum_over_ranks`. `self.bias` may be None.
    """
    raise NotImplementedError("`RowParallelLinear.forward` is not written yet.")
