"""The vocabulary-parallel embedding. Write `VocabParallelEmbedding.forward` of tensor_parallel/layers.py.

Read notebooks/07_tensor_and_sequence_parallel.ipynb first. Do not open tensor_parallel/layers.py yet: it
has the solution.

You may use:

    own_rows(tokens, rows_per_rank, vocab_size, group, what='token') -> tuple[Tensor, Tensor]
        Return each token's row in this rank's weight, and which tokens have one; the others get row
        0.
    scatter_sums(x: Tensor, dim: int, group: Group = None) -> Tensor
        Reduce-scatter along `dim` forward, all-gather backward (g-bar of sequence parallelism).
    sum_over_ranks(x: Tensor, group: Group = None) -> Tensor
        All-reduce forward, identity backward (g in Megatron-LM).
    TIME = 1
    self.group: Group, self.vocab_size: int

Check it with `python -m exercises check vocabulary_parallel`.
"""

import torch.nn.functional as F
from torch import Tensor

from comm.functions import scatter_sums, sum_over_ranks
from tensor_parallel.layers import TIME, own_rows


def forward(self, tokens: Tensor) -> Tensor:
    """Return the embeddings of tokens, of which each rank holds an n-th of the vocabulary.

    `own_rows` returns for each token its row in this rank's weight, and whether it has one; a token
    that another rank holds gets row 0. With `self.sequence_parallel` a rank gets the embeddings of
    its tokens only, which are divided along TIME.
    """
    raise NotImplementedError("`VocabParallelEmbedding.forward` is not written yet.")
