"""With sequence parallel all ranks use the first positions: each counts its tokens from 0."""

from torch import Tensor, nn

from comm.functions import own_shard

TARGET = "tensor_parallel.parallelize.PositionsOfOwnTokens.forward"
KILLER = (
    "tests.tensor_parallel.test_parallelize"
    ".test_two_ranks_with_sequence_parallel_have_the_gradients_of_one_process"
)
CAUSE = "count positions from its own first token"


def mutant(self, positions_t: Tensor) -> Tensor:
    own = own_shard(positions_t, 0, self._group)
    return nn.functional.embedding(positions_t[: len(own)], self.weight)
