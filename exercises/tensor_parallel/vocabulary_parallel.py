"""The vocabulary-parallel embedding. Write `VocabParallelEmbedding.forward` of tensor_parallel/layers.py.

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
    raise NotImplementedError(
        "The vocabulary-parallel embedding is not written yet: `VocabParallelEmbedding.forward` has no body."
    )
