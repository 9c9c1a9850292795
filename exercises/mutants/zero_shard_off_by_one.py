"""The last number of each shard never changes, because no rank owns it; the losses look normal."""

from torch import Tensor

TARGET = "data_parallel.flat.Flat.pieces"
KILLER = "tests.zero.test_zero_mutant_killers.test_every_number_of_every_parameter_is_in_one_ranks_shard"
CAUSE = "begin where the one before it ends"
SYMPTOM = "The last number of each shard never changes, and the losses look normal."


def mutant(self, shard: Tensor) -> list[tuple[int, Tensor]]:
    pieces, offset, stop = [], 0, self.mine.stop - 1
    for size in self._sizes:
        begin, end = max(self.mine.start, offset), min(stop, offset + size)
        piece = shard[begin - self.mine.start : end - self.mine.start] if begin < end else shard[:0]
        pieces.append((max(0, begin - offset) if begin < end else 0, piece))
        offset += size
    return pieces
