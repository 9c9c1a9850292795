"""The loss is too high on two ranks and more: the results of the heads come back in another order."""

from torch import Tensor

from comm.functions import exchange_shards
from context_parallel.parallel_model import SharedSequence

TARGET = "context_parallel.train_all_to_all_attention.all_heads_of_own_tokens"
KILLER = "tests.context_parallel.test_mutant_killers.test_each_head_comes_back_to_its_place"
CAUSE = "right and in the wrong order"
SYMPTOM = "The loss is too high with two ranks and more. A model with as many heads as ranks trains well."


def mutant(y_bhte: Tensor, sequence: SharedSequence) -> Tensor:
    lengths = sequence.lengths
    own = lengths[sequence.rank]
    arrived = exchange_shards(y_bhte, 2, sequence.group, lengths, [own] * sequence.size)
    return arrived.unflatten(2, (sequence.size, own)).flatten(1, 2)
